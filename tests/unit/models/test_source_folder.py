"""What a model folder must hold, and what is said when it does not."""

import json
import shutil

import pytest

from kv8.errors import ModelError
from kv8.models.source_folder import check_folder


@pytest.fixture
def folder(tiny_model, tmp_path):
    shutil.copytree(tiny_model(), tmp_path / "model")
    return tmp_path / "model"


def refused(folder, *words):
    with pytest.raises(ModelError) as caught:
        check_folder(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def test_a_whole_folder_passes(folder):
    check_folder(folder)


def test_missing_folder(tmp_path):
    refused(tmp_path / "nothing", "nothing", "is not a folder")


def test_missing_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "config.json", "no model folder")


@pytest.mark.parametrize("text", ["", "{", "not json", "\xff", "[" * 100_000])
def test_config_that_is_no_json(folder, text):
    (folder / "config.json").write_text(text, encoding="latin-1")
    refused(folder, "config.json", "cannot be read as JSON")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"llama"'])
def test_config_that_is_no_object(folder, text):
    (folder / "config.json").write_text(text)
    refused(folder, "config.json", "JSON object")


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 3}])
def test_config_without_the_model_type(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "config.json", "model_type")


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_end_tokens_that_cannot_be_read(folder, text):
    """transformers passes over such a file, and with it over the tokens that end a chat."""
    (folder / "generation_config.json").write_text(text, encoding="latin-1")
    refused(folder, "generation_config.json", "JSON")


@pytest.mark.parametrize("tokens", ["x", [1, "x"], 1.5, True, {}])
def test_end_tokens_that_are_none(folder, tokens):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens}))
    refused(folder, "generation_config.json", "eos_token_id must be", repr(tokens))


@pytest.mark.parametrize("tokens", [None, 2, [], [2, 3]])
def test_end_tokens_as_models_give_them(folder, tokens):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens}))
    check_folder(folder)
    (folder / "generation_config.json").unlink()
    check_folder(folder)


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "no *.safetensors")
    (folder / "pytorch_model.bin").touch()
    refused(folder, "pytorch_model.bin cannot be used", "save_pretrained")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, -1])
def test_truncated_weights(folder, keep):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    keep = int(keep * len(content)) if isinstance(keep, float) else keep
    path.write_bytes(content[:keep])
    refused(folder, "model.safetensors", "cut short", "Fetch it again")


def test_weights_with_a_tail(folder):
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    refused(folder, "model.safetensors", "longer than its header says")


@pytest.mark.parametrize(
    "header", [b"not json", b"[]", b'{"a": 3}', b'{"a": {"data_offsets": "x"}}', b'{"a": {}}']
)
def test_weights_with_a_damaged_header(folder, header):
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    refused(folder, "model.safetensors", "damaged header")


def test_an_index_with_a_missing_shard(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    refused(folder, "lacks model-00002-of-00002.safetensors")
    shutil.copy(
        folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors"
    )
    check_folder(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}])
def test_an_index_without_a_map(folder, index):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "weight_map")
