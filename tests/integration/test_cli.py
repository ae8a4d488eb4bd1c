"""The commands from the outside: JSON, exit codes, what goes to which stream."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
from tests.command_line import kv8

SMALL = ("--kv-cache-memory", "1MiB", "--max-model-len", "128")
GREEDY = ("--temperature", "0", "--max-tokens", "6")


def test_generate_as_json(tiny_model) -> None:
    words = (tiny_model(), "London is", "--kv-cache-dtype", "fp8", *GREEDY, *SMALL, "--json")
    result = kv8("generate", *words)
    assert result.code == 0
    answer = result.json
    assert list(answer)[:3] == ["text", "token_ids", "finish_reason"]
    assert len(answer["token_ids"]) == 6
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 6,
        "total_tokens": 16,
        "cached_tokens": 0,
    }
    assert answer["kv_cache"]["dtypes"] == {"fp8_e4m3": 4}
    assert answer["kv_cache"]["calibrated"] is False
    assert "uncalibrated" in result.err


def test_generate_as_text(tiny_model) -> None:
    model = tiny_model()
    words = ("generate", model, "London is", *GREEDY, *SMALL)
    plain, same = kv8(*words), kv8(*words, "--json")
    assert plain.code == 0
    assert plain.out == same.json["text"] + "\n"
    assert "10 prompt tokens, 6 generated (length)" in plain.err
    assert "layers 0-3: float32" in plain.err


def test_several_prompts_are_a_list_in_order(tiny_model) -> None:
    words = (tiny_model(), "one", "two", "one", *GREEDY, *SMALL, "--json")
    answers = kv8("generate", *words).json
    assert [a["usage"]["prompt_tokens"] for a in answers] == [4, 4, 4]
    assert answers[0]["token_ids"] == answers[2]["token_ids"] != answers[1]["token_ids"]


def test_a_prompt_from_stdin(tiny_model) -> None:
    words = (tiny_model(), "-", *GREEDY, *SMALL, "--json")
    assert kv8("generate", *words, stdin="abc").json["usage"]["prompt_tokens"] == 4


def test_sampling_flags_reach_the_sampler(tiny_model) -> None:
    model = tiny_model()
    base = ("generate", model, "abc", "--max-tokens", "12", "--json", *SMALL)
    one, other = kv8(*base, "--seed", "1").json, kv8(*base, "--seed", "2").json
    assert one["token_ids"] == kv8(*base, "--seed", "1").json["token_ids"] != other["token_ids"]
    narrow = kv8(*base, "--top-k", "1").json["token_ids"]
    assert narrow == kv8(*base, "--temperature", "0").json["token_ids"]
    stopped = kv8(*base, "--top_k", "1", "--stop-token-ids", narrow[3]).json
    assert stopped["finish_reason"] == "stop"
    assert stopped["stop_reason"] == narrow[3]
    assert stopped["token_ids"] == narrow[: narrow.index(narrow[3]) + 1]


def test_chat_answers_what_stdin_holds(tiny_model) -> None:
    words = ("chat", tiny_model(), "--system", "be brief", *GREEDY, *SMALL)
    plain = kv8(*words, stdin="hello\nthere\n")
    answer = kv8(*words, "--json", stdin="hello\nthere\n")
    assert plain.code == answer.code == 0
    assert plain.out == answer.json["text"] + "\n"
    prompt = "<bos>[system] be brief\n[user] hello\nthere\n[assistant] "
    num_tokens = len(prompt) - len("<bos>") + 1
    assert answer.json["usage"]["prompt_tokens"] == num_tokens
    empty = kv8(*words, stdin=" \n")
    assert empty.code == 2
    assert "stdin holds no message" in empty.err


class Terminal:
    """Somebody at a keyboard, who types these lines and then ctrl-D."""

    def __init__(self, *lines: str) -> None:
        self._lines = [*lines, ""]

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self._lines.pop(0)


def test_chat_at_a_terminal_remembers(tiny_model) -> None:
    words = ("chat", tiny_model(), "--temperature", "0", "--max-tokens", "5", *SMALL)
    result = kv8(*words, "--json", stdin=Terminal("hi\n", "\n", "again\n"))
    assert result.code == 0
    first, end = json.JSONDecoder().raw_decode(result.out)
    second = json.loads(result.out[end:])
    assert second["usage"]["prompt_tokens"] > first["usage"]["total_tokens"]
    assert second["usage"]["cached_tokens"] > 0
    assert result.err.count("> ") == 4
    plain = kv8(*words, stdin=Terminal("hi\n", "again\n"))
    assert plain.out == first["text"] + "\n" + second["text"] + "\n"


def test_a_message_too_long_does_not_end_the_conversation(tiny_model) -> None:
    words = ("chat", tiny_model(), "--temperature", "0", "--max-tokens", "5", "--json", *SMALL)
    alone = kv8(*words, stdin=Terminal("hi\n"))
    result = kv8(*words, stdin=Terminal("x" * 600 + "\n", "hi\n"))
    assert result.code == 0
    assert "tokens or less fits" in result.err
    assert "The message was dropped." in result.err
    assert result.json["token_ids"] == alone.json["token_ids"]
    assert result.json["usage"]["prompt_tokens"] == alone.json["usage"]["prompt_tokens"]
    piped = kv8(*words, stdin="x" * 600)
    assert piped.code == 2
    assert_one_error_line(piped)


@pytest.mark.parametrize("words", [("chat",), ("generate", "-")])
def test_closed_stdin_is_said(tiny_model, words) -> None:
    result = kv8(words[0], tiny_model(), *words[1:], *SMALL, stdin=None)
    assert result.code == 2
    assert "stdin is closed" in result.err


@pytest.mark.parametrize("where", ["kv8.engine.engine.Engine.step", "kv8.engine.runner.Runner.run"])
def test_ctrl_c_at_a_terminal_stops_the_answer_only(tiny_model, monkeypatch, where: str) -> None:
    words = ("--temperature", "0", "--max-tokens", "9", "--ignore-eos", "--json", *SMALL)
    work, calls = resolve_name(where), 0

    def interrupted(self, *step):
        nonlocal calls
        calls += 1
        if calls == interrupt_at:
            raise KeyboardInterrupt
        return work(self, *step)

    monkeypatch.setattr(where, interrupted)
    interrupt_at = 0
    kv8("chat", tiny_model(), *words, stdin=Terminal("hi\n"))
    # The third answer step; start-up takes as many of the calls as are not the 9 steps'.
    interrupt_at, calls = calls - 9 + 3, 0
    result = kv8("chat", tiny_model(), *words, stdin=Terminal("hi\n", "again\n"))
    assert result.code == 0
    first, end = json.JSONDecoder().raw_decode(result.out)
    assert len(first["token_ids"]) == 2
    assert len(json.loads(result.out[end:])["token_ids"]) == 9


def test_plan_as_json(tiny_model) -> None:
    result = kv8("plan", tiny_model(), "--memory", "1MiB", "--json")
    rows = {row["setting"]: row for row in result.json["rows"]}
    assert list(rows) == ["float32", "fp8_e4m3", "fp8_e5m2"]
    # 4 layers, K and V, 2 heads of 16 values, 4 bytes or 1.
    assert rows["float32"]["bytes_per_token"] == 1024
    assert rows["fp8_e4m3"]["bytes_per_token"] == 256
    assert rows["float32"]["tokens"] == 1024
    assert rows["fp8_e5m2"]["tokens"] == 4096
    assert rows["fp8_e4m3"]["max_concurrency"] == 4096 / 512
    assert rows["fp8_e4m3"]["gain"] == 4.0
    assert [row["chosen"] for row in rows.values()] == [True, False, False]


@pytest.mark.parametrize(
    "size",
    [
        ("--max-model-len", "64"),
        ("--max-model-len", "64", "--block-size", "4"),
        ("--max-model-len", "64", "--block-size", "4", "--max-num-batched-tokens", "32"),
    ],
)
def test_plan_numbers_are_the_engines(tiny_model, size: tuple[str, ...]) -> None:
    """Pitfalls 59, 60: planner, `inspect` and a started engine say the same of a hybrid model."""
    model = tiny_model("gemma3")
    skip = ("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "sliding_window")
    planned = kv8("plan", model, "--memory", "1MiB", *skip, *size, "--json").json["rows"]
    [row] = [row for row in planned if row["chosen"]]
    assert row["setting"] == "fp8_e4m3, skip sliding_window"
    words = (*skip, *size, "--kv-cache-memory", "1MiB", "--json")
    looked_at = kv8("inspect", model, *words).json
    started = kv8("generate", model, "a", *words).json["kv_cache"]
    for name in ("bytes_per_token", "tokens", "max_concurrency", "num_blocks"):
        assert row[name] == looked_at[name] == started[name]


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_plan_counts_the_skip_list_whatever_the_dtype(tiny_model, dtype: str) -> None:
    words = (tiny_model(), "--kv-cache-dtype", dtype, "--kv-cache-dtype-skip-layers")
    [row] = [row for row in kv8("plan", *words, "0", "--json").json["rows"] if row["chosen"]]
    assert row["bytes_per_token"] == kv8("inspect", *words, "0", "--json").json["bytes_per_token"]
    refused = kv8("plan", *words, "99")
    assert refused.code == 2
    assert "'99' is out of range" in refused.err


def test_plan_says_what_limits_the_gain(tiny_model) -> None:
    """Pitfall 60: bytes by window for both dtypes, and which layers gain least; `inspect` too."""
    model = tiny_model("gemma3")
    words = (model, "--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "sliding_window")
    rows = {row["setting"]: row for row in kv8("plan", *words, "--json").json["rows"]}
    mixed = rows["fp8_e4m3, skip sliding_window"]
    assert mixed["note"].startswith("limited by 3 layers with a window of 8: ")
    assert rows["fp8_e4m3"]["note"] == ""
    assert [(part["window"], part["layers"]) for part in mixed["saving"]] == [
        (None, [3]), (8, [0, 1, 2]),
    ]  # fmt: skip
    # Float32 or FP8 for the full layer's 512 tokens; the window layers stay as they were.
    assert [part["ratio"] for part in mixed["saving"]] == [4.0, 1.0]
    held, plain = (
        sum(part[name] for part in mixed["saving"]) for name in ("held_bytes", "model_dtype_bytes")
    )
    shown = kv8("inspect", *words, "--json").json
    [said] = [line for line in shown["messages"] if line.startswith("Gain over a cache in float32")]
    assert f": {plain / held:.2f}x the sequences of 512 tokens, {mixed['note']}; " in said
    assert said.endswith("x at 8 tokens.")


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gpt_oss"])
def test_plan_reports_padding(tiny_model, family) -> None:
    """Pitfall 59: where blocks of different layers do not divide, the row says what is unused."""
    words = ("--kv-cache-dtype-skip-layers", "0", "--json")
    rows = kv8("plan", tiny_model(family), *words).json["rows"]
    for row in rows:
        assert ("are padding" in row["note"]) is (row["padding_bytes"] > 0)
    assert any(row["padding_bytes"] for row in rows) is (family != "gemma4")


def test_plan_says_what_does_not_fit(tiny_model) -> None:
    result = kv8("plan", tiny_model(), "--memory", "64KiB")
    assert result.code == 0
    assert "512 tokens do not fit; 64 do" in result.out


def test_plan_and_inspect_load_no_weights(tiny_model, tmp_path: Path) -> None:
    """Pitfall 67: they answer without weights, and a bad choice ends before any are read."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:200_000]  # the header is whole, data is not
    )
    assert kv8("inspect", folder, "--kv-cache-dtype", "fp8").code in (0, 2)
    broken = kv8("generate", folder, "a", *SMALL)
    assert broken.code == 2
    assert_one_error_line(broken)
    refused = kv8("generate", folder, "a", "--kv-cache-dtype", "fp8", "--block-size", "0")
    assert "block_size" in refused.err


def test_inspect_as_json(tiny_model) -> None:
    words = ("--kv-cache-dtype", "fp8_e5m2", "--kv-cache-dtype-skip-layers", "-1", "--json")
    result = kv8("inspect", tiny_model(), *words)
    layers = result.json["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1, 2, 3]
    assert [layer["dtype"] for layer in layers] == ["fp8_e5m2"] * 3 + ["float32"]
    assert [layer["skipped"] for layer in layers] == [False] * 3 + [True]
    assert layers[0]["type"] == "full_attention"
    assert layers[0]["k"]["scale"] == layers[0]["v"]["scale"] == 1.0
    assert layers[0]["k"]["origin"].startswith("default")
    assert layers[3]["k"] == layers[0]["q"] == {"scale": None, "origin": None}
    assert result.json["settings"]["kv_cache_dtype"]["value"] == "fp8_e5m2"


def test_inspect_says_what_fp8_came_to(tiny_model) -> None:
    """Pitfall 69: the alias is resolved, with granularity, origin and how attention computes."""
    text = kv8("inspect", tiny_model(), "--kv-cache-dtype", "fp8").out
    for fact in ("fp8_e4m3", "per tensor", "static", "default", "native"):
        assert fact in text


@pytest.mark.parametrize("dtype", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16"])
def test_every_offered_dtype_serves_a_token(tiny_model, dtype: str) -> None:
    """Pitfall 67: whatever the help offers runs here."""
    words = (tiny_model(), "a", "--kv-cache-dtype", dtype, "--max-tokens", "1", *SMALL, "--json")
    result = kv8("generate", *words)
    assert result.code == 0
    assert len(result.json["token_ids"]) == 1


def test_e4m3_and_e5m2_are_not_the_same(tiny_model) -> None:
    """Pitfall 70: what was asked is what is stored; neither stands in for the other."""
    names = {
        dtype: kv8("generate", tiny_model(), "a", "--kv-cache-dtype", dtype, *SMALL, "--json").json[
            "kv_cache"
        ]["dtypes"]
        for dtype in ("fp8_e4m3", "fp8_e5m2")
    }
    assert names == {"fp8_e4m3": {"fp8_e4m3": 4}, "fp8_e5m2": {"fp8_e5m2": 4}}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["generate", "MODEL", ""], ["Prompt 0 is empty"]),
        (["generate", "MODEL"], ["Missing argument 'prompts'"]),
        (["generate"], ["Missing argument 'model'"]),
        (["generate", "/no/such/folder", "a"], ["/no/such/folder does not exist"]),
        (["generate", "smollm", "a"], ["'smollm'", "Did you mean smollm2"]),
        (["generate", "MODEL", "a", "--kv-cache-dtype", "int4"], ["'int4'", "fp8_e4m3"]),
        (["generate", "MODEL", "a", "--kv-cache-dtype", "fp8e4nv"], ["'fp8e4nv'", "fp8_e5m2"]),
        (["generate", "MODEL", "a", "--kv-cache-dtyp", "fp8"], ["--kv-cache-dtyp"]),
        (["generate", "MODEL", "a", "--temperature", "-1"], ["temperature", "-1"]),
        (["generate", "MODEL", "a", "--temperature", "hot"], ["temperature", "hot"]),
        (["generate", "MODEL", "a", "--max-model-len", "100000"], ["100000", "512"]),
        (["generate", "MODEL", "a", "--kv-cache-memory", "2 Gigs"], ["'2 Gigs'", "GiB"]),
        (["generate", "MODEL", "a", "--kv-cache-memory", "1KiB"], ["Give at least"]),
        (["generate", "MODEL", "a", "--kv-scales", "none.safetensors"], ["none.safetensors"]),
        (["generate", "MODEL", "a", "--attention-backend", "magic"], ["'magic'", "reference"]),
        (["inspect", "MODEL", "--kv-cache-dtype-skip-layers", "99"], ["'99'", "0-3"]),
        (["inspect", "MODEL", "--kv-cache-dtype-skip-layers"], ["at least one value"]),
        (["inspect", "--kv-cache-dtype-skip-layers", "0", "MODEL"], ["before it"]),
        (["plan", "MODEL", "--memory", "lots"], ["--memory", "'lots'"]),
        (["dance", "MODEL"], ["No such command 'dance'"]),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(tiny_model, words, parts) -> None:
    """Pitfalls 67, 71: one line that names the value asked for, and values that work."""
    model = str(tiny_model())
    result = kv8(*[model if word == "MODEL" else word for word in words])
    assert result.code == 2
    assert_one_error_line(result)
    for part in parts:
        assert part in result.err


def test_a_typo_in_a_layer_type_is_refused_with_a_suggestion(tiny_model) -> None:
    words = ("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "sliding_windows")
    result = kv8("inspect", tiny_model("gemma3"), *words)
    assert result.code == 2
    assert_one_error_line(result)
    assert "Did you mean 'sliding_window'" in result.err


def test_work_that_fails_is_exit_code_1(tiny_model, monkeypatch) -> None:
    from kv8.engine.runner import Runner

    run = Runner.run
    calls = 0

    def failing(self, step):
        nonlocal calls
        calls += 1
        if len(step.attention.query_lens_host) > 1:
            raise RuntimeError("the device fell off the bus")
        return run(self, step)

    monkeypatch.setattr(Runner, "run", failing)
    result = kv8("generate", tiny_model(), "a", "b", *SMALL, "--json")
    assert result.code == 1
    assert [answer["finish_reason"] for answer in result.json] == ["error", "error"]
    assert "2 of 2 requests failed" in result.err
    assert "fell off the bus" in result.err
    assert "Traceback" not in result.err
    loud = kv8("generate", tiny_model(), "a", "b", *SMALL, "--json", "--debug")
    assert "Traceback" in loud.err
    assert 'raise RuntimeError("the device fell off the bus")' in loud.err


def test_the_trace_shows_with_debug_only(tiny_model, monkeypatch) -> None:
    import kv8.llm

    def broken(*_: object, **__: object):
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(kv8.llm, "start_engine", broken)
    from tests.command_line import kv8 as run

    quiet, loud = run("generate", tiny_model(), "a"), run("generate", tiny_model(), "a", "--debug")
    assert quiet.code == loud.code == 1
    assert_one_error_line(quiet)
    assert "ZeroDivisionError: surprise" in quiet.err
    assert "bug" in quiet.err
    assert "Traceback" in loud.err


def test_verbose_logs_the_decisions(tiny_model) -> None:
    quiet = kv8("generate", tiny_model(), "a", *SMALL, "--json")
    loud = kv8("generate", tiny_model(), "a", *SMALL, "--json", "--verbose")
    assert quiet.err == ""
    assert "kv_cache_dtype = float32" in loud.err
    assert loud.json["token_ids"]


def test_an_interrupt_is_exit_code_130(tiny_model, monkeypatch) -> None:
    from kv8.engine.engine import Engine

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    result = kv8("generate", tiny_model(), "a", *SMALL)
    assert result.code == 130
    assert result.err.endswith("kv8: interrupted\n")


def run_process(*words: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "kv8", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        **options,
    )


def test_as_a_process(tiny_model) -> None:
    process = run_process("generate", str(tiny_model()), "a", *GREEDY, *SMALL, "--json")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert len(json.loads(out)["token_ids"]) == 6


def test_ctrl_c_ends_a_process_without_a_trace(tiny_model) -> None:
    process = run_process("chat", str(tiny_model()), *SMALL, "--verbose", stdin=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:  # until the model is loaded; then it waits for stdin to end
        if "KV cache:" in line:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert err.endswith("kv8: interrupted\n")
    assert "Traceback" not in err


def assert_one_error_line(result) -> None:
    lines = result.err.strip().splitlines()
    assert lines[-1].startswith("kv8: error: ")
    assert not [line for line in lines[:-1] if not line.startswith("kv8: ")]
    assert "Traceback" not in result.err
    assert result.out == ""
