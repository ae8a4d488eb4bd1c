"""``kv8 calibrate`` as a user meets it: results, refusals, interruption, and what is left."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.command_line import kv8
from tests.tiny_models import LAYERS

import kv8.calibration.observe as observing
from kv8.calibration.picture import can_draw
from kv8.errors import KV8Error

WORDS = "the cache keeps keys and values of every token that was read before and nothing else "
SMALL = ("--samples", 8, "--max-length", 64, "--batch-size", 1)
FILES = ["kv_scales.safetensors", "report.json", *(["report.png"] if can_draw() else [])]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A text of some hundred tokens; the tiny models' tokenizer makes one of each byte."""
    path = tmp_path / "texts.txt"
    path.write_text(WORDS * 8, encoding="utf-8")
    return path


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _scales(folder: Path) -> bytes:
    """Return a scales file; equal runs write equal bytes."""
    return (folder / "kv_scales.safetensors").read_bytes()


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_text_in_scales_and_report_out(strategy, tiny_model, texts, tmp_path):
    model, output = tiny_model(), tmp_path / "scales"
    command = ("calibrate", model, "--data", texts, "--output", output, *SMALL)
    result = kv8(*command, "--strategy", strategy)
    assert result.code == 0
    assert _left(output) == FILES
    each = "tensor" if strategy == "tensor" else "head"
    assert f": one fp8_e4m3 scale a {each}, from the absmax\n" in result.out
    assert f"tokens of 512 asked for, from {texts}, in 8 samples, 1 of them held out" in result.out
    assert f"Wrote {output}: {', '.join(FILES)}" in result.err
    assert f"--kv-scales {output / 'kv_scales.safetensors'}" in result.err

    report = json.loads((output / "report.json").read_text())
    rows = {(row["layer"], row["side"]): row for row in report["layers"]}
    assert rows.keys() == {(layer, side) for layer in range(LAYERS) for side in "qkv"}
    for row in rows.values():
        amax = row["amax"] if strategy == "attn_head" else [max(row["amax"])]
        assert row["scale"] == pytest.approx([x / 448 for x in amax], rel=2**-23)
    # What the other commands serve with is what the report says, number by number.
    scales = output / "kv_scales.safetensors"
    shown = kv8("inspect", model, "--kv-cache-dtype", "fp8", "--kv-scales", scales, "--json").json
    for layer in shown["layers"]:
        for side in "kv":
            found = layer[side]["scale"]
            found = found if isinstance(found, list) else [found]
            assert found == rows[layer["layer"], side]["scale"]
        assert layer["q"]["scale"] is None


def test_json_is_the_report_and_the_files(tiny_model, texts, tmp_path):
    output = tmp_path / "scales"
    command = ("calibrate", tiny_model(), "--data", texts, "--output", output, *SMALL)
    result = kv8(*command, "--json")
    assert result.code == 0
    found = result.json
    assert found.pop("files") == [str(output / name) for name in FILES]
    assert found == json.loads((output / "report.json").read_text())
    assert found["tokens_asked"] == 512
    assert sum(found["tokens_by_part"].values()) == found["tokens_used"] <= 512


@pytest.mark.parametrize("source", ["random", "self"])
def test_nothing_need_be_brought(source, tiny_model, tmp_path):
    command = ("calibrate", tiny_model(), "--data", source, *SMALL, "--json")
    found = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        result = kv8(*command, "--output", tmp_path / name, "--seed", seed)
        assert result.code == 0
        found[name] = _scales(tmp_path / name)
        assert result.json["tokens_used"] == 512
    assert found["a"] == found["b"] != found["c"]


def test_query_scales_and_a_checkpoint(tiny_model, texts, tmp_path):
    output = tmp_path / "model"
    command = ("calibrate", tiny_model(), "--data", texts, "--output", output, *SMALL)
    result = kv8(*command, "--checkpoint", "--query-scales")
    assert result.code == 0
    assert f"Try it: kv8 generate {output} 'Once upon a time'\n" in result.err
    report = json.loads((output / "report.json").read_text())
    shown = kv8("inspect", output, "--json").json
    assert {layer["dtype"] for layer in shown["layers"]} == {"fp8_e4m3"}
    rows = {(row["layer"], row["side"]): row["scale"] for row in report["layers"]}
    for layer in shown["layers"]:
        for side in "qkv":
            assert [layer[side]["scale"]] == pytest.approx(rows[layer["layer"], side], rel=2**-8)


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


GOOD_LINE = json.dumps({"text": WORDS}).encode() + b"\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt is empty"),
        ("binary.txt", bytes(range(256)), "binary.txt is not text: it holds zero bytes"),
        ("latin.txt", b"caf\xe9 " * 30, "not text in UTF-8: invalid continuation byte at byte 3"),
        ("broken.jsonl", GOOD_LINE * 6 + b'{"text": "\n' + GOOD_LINE, "broken.jsonl, line 7: is"),
        ("short.txt", b"hello", "holds 7 tokens in all, which is less than one block of 16"),
        ("table.csv", b"text\n", "its name ends in .csv, not in .txt or .jsonl"),
        ("missing.txt", None, "missing.txt does not exist"),
    ],
)
def test_bad_text_is_refused_and_nothing_is_written(name, content, message, tiny_model, tmp_path):
    source = tmp_path / name
    if content is not None:
        source.write_bytes(content)
    before = _left(tmp_path)
    result = kv8("calibrate", tiny_model(), "--data", source, "--output", tmp_path / "scales")
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.err.startswith("kv8: error: ")
    assert result.err.count("\n") == 1
    assert _left(tmp_path) == before


def test_a_folder_without_data(tiny_model, tmp_path):
    (tmp_path / "data").mkdir()
    result = kv8("calibrate", tiny_model(), "--data", tmp_path / "data", "--output", tmp_path / "x")
    assert result.code == 2
    assert "is a folder without data" in result.err
    assert _left(tmp_path) == ["data"]


def test_a_hub_id_without_network_or_library(tiny_model, tmp_path):
    """With the extra the hub is out of reach, without it the extra is named; both say how else."""
    result = kv8("calibrate", tiny_model(), "--data", "org/name", "--output", tmp_path / "scales")
    assert result.code in (1, 2)
    assert "could not be fetched" in result.err or "pip install 'kv8[datasets]'" in result.err
    assert "on random, or on self" in result.err
    assert _left(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--statistic", "mean"), "statistic='mean' is not known. Allowed: absmax, percentile"),
        (("--strategy", "channel"), "strategy='channel' is not known. Allowed: tensor, attn_head"),
        (("--samples", 0), "samples must be a whole number of at least 1, got 0"),
        (("--max-length", 8), "max_length must be a whole number of at least 16, got 8"),
        (("--percentile", 99), "has none"),
        (("--kv-cache-dtype", "bfloat16"), "takes no scales"),
        (("--held-out", 1), "held_out must be a share"),
    ],
)
def test_bad_options_are_refused_by_name(words, message, tiny_model, texts, tmp_path):
    output = tmp_path / "scales"
    result = kv8("calibrate", tiny_model(), "--data", texts, "--output", output, *words)
    assert result.code == 2
    assert message in result.err
    assert _left(tmp_path) == ["texts.txt"]


def test_an_output_that_exists_is_left_alone(tiny_model, texts, tmp_path):
    output = tmp_path / "scales"
    output.mkdir()
    _write(output / "mine.txt", b"mine")
    result = kv8("calibrate", tiny_model(), "--data", texts, "--output", output)
    assert result.code == 2
    assert "exists" in result.err
    assert _left(output) == ["mine.txt"]


def test_data_and_output_are_asked_for(tiny_model, texts, tmp_path):
    for words, missing in ((("--output", "x"), "--data"), (("--data", texts), "--output")):
        result = kv8("calibrate", tiny_model(), *words)
        assert result.code == 2
        assert f"Missing option '{missing}'" in result.err


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_an_interrupt_has_its_exit_code_and_the_same_command_goes_on(
    number, code, word, tiny_model, texts, tmp_path, monkeypatch
):
    """After three of eight samples; what comes out in the end is as if it never was."""
    command = ("calibrate", tiny_model(), "--data", texts, *SMALL)
    assert kv8(*command, "--output", tmp_path / "whole").code == 0

    real, starts = observing.collect, []

    def collect(*args: Any, on_batch: Any, start: int, **options: Any) -> None:
        starts.append(start)

        def interrupting(num_done: int) -> None:
            on_batch(num_done)
            if num_done == 3 and len(starts) == 1:
                signal.raise_signal(number)

        real(*args, on_batch=interrupting, start=start, **options)

    monkeypatch.setattr(observing, "collect", collect)
    output = tmp_path / "scales"
    result = kv8(*command, "--output", output)
    assert (result.code, result.out) == (code, "")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "Stopped after 3 of 8 samples" in result.err
    assert "the same command goes on from there" in result.err
    assert result.err.endswith(f"kv8: {word}\n")
    assert not output.exists()
    assert _left(tmp_path) == [".scales.partial", "texts.txt", "whole"]

    other = kv8(*command, "--output", output, "--held-out", 0.5)
    assert other.code == 2
    assert "held_out" in other.err

    assert kv8(*command, "--output", output).code == 0
    assert starts == [0, 3]
    assert _left(tmp_path) == ["scales", "texts.txt", "whole"]
    assert _scales(output) == _scales(tmp_path / "whole")
    assert (output / "report.json").read_bytes() == (tmp_path / "whole/report.json").read_bytes()


def test_a_picture_that_cannot_be_drawn_is_said_before_the_work(
    tiny_model, texts, tmp_path, monkeypatch
):
    monkeypatch.setattr("kv8.calibration.calibrate.can_draw", lambda: False)
    output = tmp_path / "scales"
    result = kv8("calibrate", tiny_model(), "--data", texts, "--output", output, *SMALL)
    assert result.code == 0
    assert "kv8: warning: There will be no picture" in result.err
    assert "pip install 'kv8[report]'" in result.err
    assert _left(output) == ["kv_scales.safetensors", "report.json"]


def test_the_report_s_warnings_are_said(tiny_model, tmp_path):
    source = _write(tmp_path / "a.txt", b"just enough for one single sample.")
    result = kv8(
        *("calibrate", tiny_model(), "--data", source, "--output", tmp_path / "scales"),
        *("--samples", 1, "--max-length", 64),
    )
    assert result.code == 0
    assert "kv8: warning: There was one sample to measure" in result.err
    assert "kv8: warning: No text was held out" in result.err


def test_python_says_the_same_as_the_command(tiny_model, texts, tmp_path):
    import kv8 as package

    command = ("calibrate", tiny_model(), "--data", texts, "--output", tmp_path / "a", *SMALL)
    shown = kv8(*command, "--json").json
    options: dict[str, Any] = {"samples": 8, "max_length": 64, "batch_size": 1, "use_tqdm": False}
    found = package.calibrate(tiny_model(), texts, **options)
    assert found.files == ()
    assert json.loads(json.dumps(found.report.as_dict())) == {
        name: value for name, value in shown.items() if name != "files"
    }
    with pytest.raises(KV8Error, match=r"sampels.*Did you mean samples"):
        package.calibrate(tiny_model(), texts, sampels=8)


def test_inspect_says_when_scales_are_measured(tiny_model):
    """It reads no weights, so the table cannot show what ``--calibrate-on`` will find."""
    words = ("inspect", tiny_model(), "--kv-cache-dtype", "fp8")
    hint = "The scales are measured when the model is loaded"
    for more, expected in ((("--calibrate-on", "random"), True), ((), False)):
        result = kv8(*words, *more)
        assert result.code == 0
        assert (hint in result.err) is expected
