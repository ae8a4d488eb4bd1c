"""Starts that must fail: before the port opens, with exit code 2 and one line that says why."""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.command_line import kv8
from tests.tiny_gguf import VOCAB, write_gguf
from tests.tiny_models import TinyModel, make_config, make_model

FP8 = ("--kv-cache-dtype", "fp8")
Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refused]:
    """Return what runs ``kv8 serve``, which must fail at once, and returns the line it said."""
    opened = []
    listen = socket.socket.listen
    monkeypatch.setattr(
        socket.socket, "listen", lambda self, *backlog: opened.append(1) or listen(self, *backlog)
    )

    def start(*words: object) -> str:
        result = kv8("serve", *words, *([] if "--port" in words else ["--port", "0"]))
        assert result.code == 2
        lines = result.err.strip().splitlines()
        assert len(lines) == 1, result.err
        assert lines[0].startswith("kv8: error: ")
        return lines[0]

    yield start
    assert not opened


# A word of the line, and the words that cause it.
FAILURES = {
    "no such model": ("nowhere", ["/nowhere/at/all"]),
    "cache dtype": ("kv_cache_dtype", ["--kv-cache-dtype", "fp7"]),
    "skip list": ("sliding_window", ["--kv-cache-dtype-skip-layers", "sliding_windows"]),
    "scales file": ("scales", [*FP8, "--kv-scales", "/nowhere.safetensors"]),
    "no text": ("/nowhere.txt does not exist", [*FP8, "--calibrate-on", "/nowhere.txt"]),
    "own text": ("needs a model that can write", [*FP8, "--calibrate-on", "self"]),
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
def test_a_start_that_must_fail_fails_before_the_port_opens(
    tiny_model: TinyModel, kind: str, refused: Refused
) -> None:
    """Pitfalls 56, 67: exit code 2, one line, nobody was ever let in."""
    said, words = FAILURES[kind]
    model = [] if kind == "no such model" else [tiny_model()]
    assert said in refused(*model, *words)


def test_a_bad_scale(tiny_model: TinyModel, tmp_path: Path, refused: Refused) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor([0.1 if layer else 0.0])
        for layer in range(4)
        for side in "kv"
    }
    save_file(scales, tmp_path / "scales.safetensors")
    said = refused(tiny_model(), *FP8, "--kv-scales", tmp_path / "scales.safetensors")
    assert "layer 0" in said


def test_an_empty_key_in_the_environment_does_not_open_the_server(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setenv("KV8_API_KEY", "")
    assert "KV8_API_KEY is set, but empty" in refused(tiny_model())


def test_a_chat_template_that_is_no_jinja(
    tiny_model: TinyModel, tmp_path: Path, refused: Refused
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% if %}")
    assert "line 1" in refused(tiny_model(), "--chat-template", template)


@pytest.mark.parametrize("text", ["", "abc"])
def test_a_text_too_short_to_measure_on(
    tiny_model: TinyModel, tmp_path: Path, refused: Refused, text: str
) -> None:
    (tmp_path / "short.txt").write_text(text)
    said = refused(tiny_model(), *FP8, "--calibrate-on", tmp_path / "short.txt")
    assert "short.txt" in said


def test_a_taken_port(tiny_model: TinyModel, refused: Refused) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        socket.SocketType.listen(other)  # not the one that is watched
        port = other.getsockname()[1]
        said = refused(tiny_model(), "--port", port)
    assert "another program has the port" in said
    assert str(port) in said


def test_weights_are_reckoned_in_the_type_they_are_loaded_as(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of 16-bit numbers takes twice its files' size as float32."""

    async def stopped(life: object) -> bool:
        return True

    folder = tiny_model()
    size = (folder / "model.safetensors").stat().st_size  # of float32 numbers
    monkeypatch.setattr("kv8.server.preflight.free_memory", lambda device: size // 2 + 3 * 2**20)
    words = ["--port", "0", "--kv-cache-memory", "3MiB"]
    result = kv8("serve", folder, *words, "--dtype", "float32")
    assert result.code == 2
    assert "memory are free" in result.err
    monkeypatch.setattr("kv8.server.run.Lifecycle.run", stopped)
    assert kv8("serve", folder, *words, "--dtype", "bfloat16").code == 0


def test_a_layer_no_backend_can_serve(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Pitfall 56: what the attention kernels cannot do is found before anybody is let in."""
    from kv8.attention.reference import ReferenceBackend

    def refuses(self: object, layer: object) -> str | None:
        return "no sinks in this format" if layer.geometry.layer == 2 else None

    monkeypatch.setattr(ReferenceBackend, "refuses", refuses)
    said = refused(tiny_model("gpt_oss"), *FP8, "--attention-backend", "reference")
    assert "layer 2: no sinks in this format" in said


def cut_short(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-1])


def header_alone(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:100])


def no_shard(weights: Path) -> None:
    weights.unlink()
    shards = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (weights.parent / "model.safetensors.index.json").write_text(json.dumps(shards))


def another_name(weights: Path) -> None:
    weights.rename(weights.parent / "weights.safetensors")


def lacking(weights: Path) -> None:
    tensors = load_file(weights)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})


def of_another_model(weights: Path) -> None:
    make_model(make_config("llama", hidden_size=32)).save_pretrained(weights.parent / "other")
    shutil.copy(weights.parent / "other" / "model.safetensors", weights)


# What is done to the file of weights, and a word of the line.
DAMAGES = {
    cut_short: "model.safetensors is cut short",
    header_alone: "model.safetensors is cut short",
    no_shard: "lacks model-00001-of-00001.safetensors",
    another_name: "has no safetensors weights (model.safetensors, or",
    lacking: "missing from the checkpoint: model.layers.2.mlp.up_proj.weight",
    of_another_model: "have another shape than the config says: lm_head.weight ((260, 32), not",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_are_not_the_models(
    tiny_model: TinyModel, tmp_path: Path, damage: Callable[[Path], None], refused: Refused
) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "damaged")
    damage(folder / "model.safetensors")
    assert DAMAGES[damage] in refused(folder, "--kv-cache-memory", "2MiB")


def test_a_gguf_file_cut_short(tmp_path: Path, refused: Refused) -> None:
    model = make_model(make_config("llama", vocab_size=VOCAB))
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama")
    path.write_bytes(path.read_bytes()[:-1000])
    assert "tiny.gguf is cut short" in refused(path)
