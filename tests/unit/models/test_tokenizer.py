"""Loading a tokenizer from a folder, or saying in one sentence why not."""

import json
import shutil

import pytest
from tests.tiny_gguf import VOCAB, byte_level_vocabulary, write_gguf
from tests.tiny_models import make_config, make_model

from kv8.errors import ModelError, SourceError
from kv8.models.source import ModelSource, resolve_source
from kv8.models.tokenizer import load_tokenizer


@pytest.fixture
def source(tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    return ModelSource("model", folder, "a test's model")


def refused(source, *words, override=None, kind=ModelError):
    with pytest.raises(kind) as caught:
        load_tokenizer(source, override)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_the_models_own(source):
    tokenizer = load_tokenizer(source, None)
    text = "naïve 日本語 👩‍👩‍👧 ok"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_a_missing_one(source):
    for path in source.folder.glob("tokenizer*"):
        path.unlink()
    refused(source, str(source.folder), "holds no tokenizer", "--tokenizer")


def test_another_folder_needs_no_weights(source, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source.folder / name).rename(other / name)
    refused(source, "holds no tokenizer")
    assert load_tokenizer(source, str(other)).encode("ok", add_special_tokens=False)
    refused(source, "holds no tokenizer", override=str(tmp_path))
    missing = tmp_path / "nothing"
    refused(source, f"tokenizer: {missing} does not exist", override=str(missing))
    refused(source, "org/name", "network", override="org/name", kind=SourceError)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}'])
def test_a_broken_one(source, text):
    (source.folder / "tokenizer.json").write_text(text)
    refused(source, str(source.folder), "cannot be read", "--tokenizer")


def test_code_from_the_checkpoint_is_never_run(source):
    path = source.folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "EvilTokenizer"
    config["auto_map"] = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
    path.write_text(json.dumps(config))
    (source.folder / "evil.py").write_text("raise SystemExit('ran')")
    refused(source, "cannot be read")


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_a_converted_one_is_read_as_it_is_written(tmp_path, monkeypatch, family):
    """transformers rebuilds the tokenizers of some model types by rules of its own."""
    monkeypatch.setenv("KV8_CACHE", str(tmp_path / "cache"))
    model = make_model(make_config(family, vocab_size=VOCAB))
    vocabulary = byte_level_vocabulary() | {"tokenizer.ggml.pre": "smollm"}
    path = write_gguf(tmp_path / "tiny.gguf", model, family, tokenizer=vocabulary)
    tokenizer = load_tokenizer(resolve_source(str(path)))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("123 ab")
    assert [span for _, span in pieces] == [(0, 1), (1, 2), (2, 3), (3, 6)]
    # NFC would compose the letter and its accent.
    assert tokenizer.decode(tokenizer.encode("e\u0301", add_special_tokens=False)) == "e\u0301"
