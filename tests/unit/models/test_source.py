"""From what the user typed to a folder, or to one sentence that says why not."""

import os
import shutil

import gguf
import huggingface_hub.constants
import pytest
import torch
from tests.tiny_gguf import VOCAB, write_gguf
from tests.tiny_models import make_config, make_model
from transformers import AutoModelForCausalLM

from kv8.errors import KV8Error, ModelError, SourceError
from kv8.models.source import resolve_source


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KV8_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


def refused(model, *words, kind=ModelError):
    with pytest.raises(kind) as caught:
        resolve_source(str(model))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert isinstance(caught.value, KV8Error)


def test_a_local_folder(tiny_model):
    source = resolve_source(str(tiny_model()))
    assert source.folder == tiny_model()
    assert str(tiny_model()) in source.description


def test_a_folder_beats_a_hub_id(tiny_model, tmp_path, monkeypatch):
    shutil.copytree(tiny_model(), tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve_source("org/name").description == "local folder org/name"


def test_home_is_expanded(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(tiny_model(), tmp_path / "model")
    assert resolve_source("~/model").folder == tmp_path / "model"


@pytest.mark.parametrize("name", ["smollm", "smolm2", "SmolLM2", "SmolLM2-135M"])
def test_an_unknown_name_gets_a_suggestion(name):
    refused(name, repr(name), "gemma3-270m, smollm2", "Did you mean smollm2?")


def test_an_unknown_name_far_from_all():
    refused("llama", "'llama'", "gemma3-270m, smollm2")


@pytest.mark.parametrize("model", ["./nothing", "/nothing/here", "a/b/c", "~/nothing", "x.gguf"])
def test_a_path_that_does_not_exist(model):
    refused(model, model, "does not exist")


def test_a_file_that_is_no_gguf_file(tiny_model):
    refused(tiny_model() / "config.json", "config.json", "not a .gguf file", "folder")


def test_a_hub_id_without_network():
    refused("org/name", "org/name", "not in the hub's cache", "network", kind=SourceError)


def test_a_hub_id_in_the_local_cache(tiny_model, tmp_path):
    repository = tmp_path / "hub" / "models--org--name"
    shutil.copytree(tiny_model(), repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    source = resolve_source("org/name")
    assert source.folder == repository / "snapshots" / "abc"
    assert source.description == "hub model org/name"
    # Half a snapshot is not good enough, and there is no network to complete it from.
    (source.folder / "model.safetensors").unlink()
    refused("org/name", "org/name", "as far as it could be fetched", "no *.safetensors")


@pytest.fixture
def gguf_path(tmp_path):
    model = make_model(make_config("llama", vocab_size=VOCAB))
    return write_gguf(tmp_path / "tiny.gguf", model, "llama")


def test_a_gguf_file_is_converted_once(gguf_path, cache, monkeypatch):
    first = resolve_source(str(gguf_path))
    assert first.folder.parent == cache
    assert first.folder.name.startswith("tiny-")
    assert AutoModelForCausalLM.from_pretrained(first.folder).dtype == torch.float32
    monkeypatch.setattr("kv8.models.source.convert_gguf", None)
    assert resolve_source(str(gguf_path)).folder == first.folder
    monkeypatch.chdir(gguf_path.parent)
    assert resolve_source("tiny.gguf").folder == first.folder


def test_a_changed_gguf_file_is_converted_again(gguf_path):
    first = resolve_source(str(gguf_path))
    model = make_model(make_config("llama", vocab_size=VOCAB), seed=3)
    write_gguf(gguf_path, model, "llama")
    os.utime(gguf_path, ns=(0, 10**9))
    second = resolve_source(str(gguf_path))
    assert second.folder != first.folder
    weights = AutoModelForCausalLM.from_pretrained(second.folder).lm_head.weight
    assert torch.equal(weights, model.lm_head.weight)


def test_a_new_converter_converts_again(gguf_path, monkeypatch):
    first = resolve_source(str(gguf_path))
    monkeypatch.setattr("kv8.models.source.CONVERTER_VERSION", 99)
    assert resolve_source(str(gguf_path)).folder != first.folder


def test_a_damaged_gguf_file_leaves_no_folder(gguf_path, cache):
    gguf_path.write_bytes(gguf_path.read_bytes()[:-1000])
    refused(gguf_path, "tiny.gguf", "cut short")
    assert all(path.suffix == ".lock" for path in cache.iterdir())


def test_a_packed_gguf_file_becomes_bfloat16(tmp_path):
    model = make_model(make_config("llama", vocab_size=VOCAB))
    path = write_gguf(tmp_path / "q.gguf", model, "llama", packing=gguf.GGMLQuantizationType.Q8_0)
    source = resolve_source(str(path))
    assert AutoModelForCausalLM.from_pretrained(source.folder).dtype == torch.bfloat16
