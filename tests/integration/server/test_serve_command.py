"""``kv8 serve`` as users run it: a process, its port, its signals, its exit code."""

import json
import shutil
import signal
import socket
import sys

import pytest
from safetensors.torch import load_file, save_file
from tests.command_line import kv8
from tests.server_process import server_process
from torch import tensor

LONG = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
MEMORY = ("--port", 0, "--kv-cache-memory", "2MiB")


def until_ready(server) -> None:
    server.until_said(r"kv8: ready")
    assert server.client().get("/health").status_code == 200


# A process takes seconds to start, so each of these looks at more than one thing.
@pytest.mark.parametrize(
    ("family", "words", "expected", "number"),
    [
        (
            "gemma3",
            ["--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "sliding_window"],
            ["float32", "float32", "float32", "fp8_e4m3"],
            signal.SIGTERM,
        ),
        (
            "llama",
            ["--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0", "1", "3"],
            ["float32", "float32", "fp8_e4m3", "float32"],
            signal.SIGINT,
        ),
    ],
)
def test_the_flags_of_vllm_serve_work_as_they_are_until_a_signal_that_ends_with_0(
    tiny_model, family, words, expected, number
) -> None:
    """A signal has what runs finished."""
    with server_process(tiny_model(family), *words, *MEMORY) as server:
        until_ready(server)
        layers = server.client().get("/v1/kv_cache").json()["layers"]
        assert [layer["dtype"] for layer in layers] == expected
        with server.client().stream("POST", "/v1/completions", json=LONG | {"stream": True}) as got:
            lines = got.iter_lines()
            next(lines)
            server.signal(number)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait() == 0


def test_the_key_comes_from_the_environment_and_a_second_signal_ends_what_runs(tiny_model) -> None:
    folder = tiny_model(max_position_embeddings=65536)
    with server_process(folder, *MEMORY[:2], env={"KV8_API_KEY": "secret"}) as server:
        until_ready(server)
        assert server.client().get("/v1/models").status_code == 401
        headers = {"authorization": "Bearer secret"}
        body = LONG | {"stream": True, "max_tokens": 60000}
        with server.client(headers=headers).stream("POST", "/v1/completions", json=body) as got:
            lines = got.iter_lines()
            next(lines)
            server.signal()
            server.until_said(r"a second signal")
            server.signal()
            last = [line for line in lines if line][-1]
        assert "The server was stopped." in last
        assert server.wait() == 1


# Starts that must fail: a word of the line, and the words that cause it.
FAILURES = {
    "no such model": ("nowhere", ["/nowhere/at/all"]),
    "cache dtype": ("kv_cache_dtype", ["--kv-cache-dtype", "fp7"]),
    "skip list": ("sliding_window", ["--kv-cache-dtype-skip-layers", "sliding_windows"]),
    "scales file": ("scales", ["--kv-cache-dtype", "fp8", "--kv-scales", "/nowhere.safetensors"]),
    "backend": ("attention_backend", ["--attention-backend", "magic"]),
    "length": ("max_model_len", ["--max-model-len", "100000"]),
    "little memory": ("kv_cache_memory", ["--kv-cache-memory", "100B"]),
    "much memory": ("memory are free", ["--kv-cache-memory", "100TiB"]),
    "port": ("port", ["--port", "70000"]),
    "no host": ("host is empty", ["--host", ""]),
    "foreign host": ("--host", ["--host", "192.0.2.1"]),
    "template": ("chat_template", ["--chat-template", "/nowhere.jinja"]),
    "key of blanks": ("api_key", ["--api-key", " "]),
    "origin": ("allowed_origins", ["--allowed-origins", "example.org"]),
    "dtype": ("dtype='int8'", ["--dtype", "int8"]),
    "unknown flag": ("No such option", ["--nope"]),
    "a word for a number": ("--max-queued", ["--max-queued", "many"]),
    "body size": ("max_body_size", ["--max-body-size", "many"]),
    "queue": ("max_queued", ["--max-queued", "-1"]),
    "empty key": ("api_key", ["--api-key", ""]),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_start_that_must_fail_fails_before_the_port_opens(tiny_model, kind, monkeypatch) -> None:
    """Pitfalls 56, 67: exit code 2, one line, nobody was ever let in."""
    said, words = FAILURES[kind]
    model = [] if kind == "no such model" else [tiny_model()]
    opened = []
    listen = socket.socket.listen
    monkeypatch.setattr(
        socket.socket, "listen", lambda self, *backlog: opened.append(1) or listen(self, *backlog)
    )
    result = kv8("serve", *model, *([] if "--port" in words else ["--port", "0"]), *words)
    assert result.code == 2
    lines = result.err.strip().splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("kv8: error: ")
    assert said in lines[0]
    assert not opened


def test_a_bad_scale_fails_before_the_port_opens(tiny_model, tmp_path) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{side}_scale": tensor([0.1 if layer else 0.0])
        for layer in range(4)
        for side in "kv"
    }
    save_file(scales, tmp_path / "scales.safetensors")
    words = ["--kv-cache-dtype", "fp8", "--kv-scales", tmp_path / "scales.safetensors"]
    result = kv8("serve", tiny_model(), "--port", "0", *words)
    assert result.code == 2
    assert "layer 0" in result.err
    assert "listening" not in result.err


def test_an_empty_key_in_the_environment_does_not_open_the_server(tiny_model, monkeypatch) -> None:
    monkeypatch.setenv("KV8_API_KEY", "")
    result = kv8("serve", tiny_model(), "--port", "0")
    assert result.code == 2
    assert "KV8_API_KEY is set, but empty" in result.err


def test_a_chat_template_that_is_no_jinja_fails_before_the_port_opens(tiny_model, tmp_path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% if %}")
    result = kv8("serve", tiny_model(), "--port", "0", "--chat-template", template)
    assert result.code == 2
    assert "line 1" in result.err
    assert "listening" not in result.err


@pytest.mark.parametrize("damage", ["cut short", "no shard"])
def test_damaged_weight_files_fail_before_the_port_opens(tiny_model, tmp_path, damage) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_model(), folder)
    weights = folder / "model.safetensors"
    if damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        weights.unlink()
        shards = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    result = kv8("serve", folder, *MEMORY)
    assert result.code == 2
    assert ("cut short" if damage == "cut short" else "lacks model-00001") in result.err
    assert "listening" not in result.err


def test_weights_are_reckoned_in_the_type_they_are_loaded_as(tiny_model, monkeypatch) -> None:
    """A checkpoint of 16-bit numbers takes twice its files' size as float32."""
    folder = tiny_model()
    size = (folder / "model.safetensors").stat().st_size  # of float32 numbers
    monkeypatch.setattr("kv8.server.preflight.free_memory", lambda device: size // 2 + 3 * 2**20)
    words = ["--port", "0", "--kv-cache-memory", "3MiB"]
    result = kv8("serve", folder, *words, "--dtype", "float32")
    assert result.code == 2
    assert "memory are free" in result.err
    monkeypatch.setattr("kv8.server.run.Lifecycle.run", stopped)
    assert kv8("serve", folder, *words, "--dtype", "bfloat16").code == 0


async def stopped(self) -> bool:
    """Stand in for a server's life that ends at once."""
    return True


def test_a_layer_no_backend_can_serve_fails_before_the_port_opens(tiny_model, monkeypatch) -> None:
    """Pitfall 56: what the attention kernels cannot do is found before anybody is let in."""
    from kv8.attention.reference import ReferenceBackend

    def refuses(self, layer):
        return "no sinks in this format" if layer.geometry.layer == 2 else None

    monkeypatch.setattr(ReferenceBackend, "refuses", refuses)
    words = ["--kv-cache-dtype", "fp8", "--attention-backend", "reference"]
    result = kv8("serve", tiny_model("gpt_oss"), "--port", "0", *words)
    assert result.code == 2
    assert "layer 2: no sinks in this format" in result.err
    assert "listening" not in result.err


def test_weights_of_another_model_end_the_server_with_one_line(tiny_model, tmp_path) -> None:
    """Which tensors a model wants is known once it is built, after the port has opened."""
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_model(), folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    result = kv8("serve", folder, *MEMORY)
    assert result.code == 2
    said = result.err.strip().splitlines()
    assert "listening" in said[0]
    assert "model.layers.2.mlp.up_proj.weight" in said[-1]
    assert [line for line in said if "error" in line] == said[-1:]


def test_a_taken_port_is_told(tiny_model) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = kv8("serve", tiny_model(), "--port", port)
    assert result.code == 2
    assert "another program has the port" in result.err
    assert str(port) in result.err
    assert len(result.err.strip().splitlines()) == 1


def test_without_the_extra_it_says_what_to_install(tiny_model, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kv8.server.run")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "kv8.server.lifecycle", raising=False)
    result = kv8("serve", tiny_model(), "--port", "0")
    assert result.code == 2
    assert "pip install 'kv8[server]'" in result.err
