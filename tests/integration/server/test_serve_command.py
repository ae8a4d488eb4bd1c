"""``kv8 serve`` as users run it: its flags, its signals, its exit code, what it says."""

import gc
import signal
import sys

import pytest
from tests.command_line import kv8
from tests.server_process import server_here, server_process

from kv8.errors import UnsupportedModelError

LONG = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
MEMORY = ("--port", 0, "--kv-cache-memory", "2MiB")


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
    tiny_model, family, words, expected, number, monkeypatch
) -> None:
    """A signal has what runs finished. Meanwhile nobody waits for the garbage collector."""
    handlers = []  # of the signal, when each line is said
    monkeypatch.setattr("kv8.cli.serve.note", lambda _: handlers.append(signal.getsignal(number)))
    before = signal.getsignal(number)

    def use(client, stop) -> tuple[list, str]:
        assert gc.get_freeze_count() > 0
        layers = client.get("/v1/kv_cache").json()["layers"]
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as got:
            lines = got.iter_lines()
            next(lines)
            stop(number)
            return layers, [line for line in lines if line][-1]

    result, (layers, last) = server_here(use, tiny_model(family), *words, *MEMORY)
    assert [layer["dtype"] for layer in layers] == expected
    assert last == "data: [DONE]"
    assert result.code == 0, result.err
    assert gc.get_freeze_count() == 0
    assert len(handlers) >= 2
    assert before not in handlers  # a signal counts from the first line on


def test_the_key_comes_from_the_environment_and_a_second_signal_ends_what_runs(tiny_model) -> None:
    """A process of its own takes seconds to start, so this one shows all that takes one."""
    folder = tiny_model(max_position_embeddings=65536)
    with server_process(folder, *MEMORY[:2], env={"KV8_API_KEY": "secret"}) as server:
        server.until_said(r"kv8: ready")
        assert server.client().get("/health").status_code == 200
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


def test_what_only_loading_can_find_ends_the_server_with_one_line(tiny_model, monkeypatch) -> None:
    """Whether a model gives transformers' own results is known once its weights are there."""

    def differs(*model) -> None:
        raise UnsupportedModelError("layer 2 attends differently from transformers")

    monkeypatch.setattr("kv8.models.load.verify_model", differs)
    result = kv8("serve", tiny_model(), *MEMORY)
    assert result.code == 2
    said = result.err.strip().splitlines()
    assert "listening" in said[0]
    assert "layer 2 attends differently" in said[-1]
    assert [line for line in said if "error" in line] == said[-1:]


def test_without_the_extra_it_says_what_to_install(tiny_model, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kv8.server.run")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "kv8.server.lifecycle", raising=False)
    result = kv8("serve", tiny_model(), "--port", "0")
    assert result.code == 2
    assert "pip install 'kv8[server]'" in result.err
