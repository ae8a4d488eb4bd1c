"""Models kv8 would answer wrongly for are refused before weights are read, with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import FAMILIES, make_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kv8.errors import ModelError, UnsupportedModelError
from kv8.models.config import load_config
from kv8.models.geometry import read_geometry

REFUSED = {
    "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention",
    "minicpm3": "latent attention",
    "mamba": "linear_attention.*recurrent state",
    "mamba2": "linear_attention.*recurrent state",
    "jamba": "linear_attention.*recurrent state",
    "bamba": "linear_attention.*recurrent state",
    "falcon_h1": "hybrid.*recurrent state",
    "zamba2": "recurrent state",
    "recurrent_gemma": "recurrent state",
    "qwen3_next": "linear_attention.*recurrent state",
    "minimax": "linear_attention.*recurrent state",
    "rwkv": "recurrent state",
    "llama4_text": "chunked_attention.*fixed chunks",
    "bart": "encoder-decoder",
    "whisper": "encoder-decoder",
    "bloom": "attention interface",
    "mpt": "attention interface",
    "t5": "encoder-decoder",
    "vit": "no causal language model",
}


@pytest.mark.parametrize(("model_type", "reason"), REFUSED.items())
def test_families_that_cannot_be_served(model_type: str, reason: str) -> None:
    """Pitfall 42: latent attention and the like are refused, never served approximately."""
    config = CONFIG_MAPPING[model_type]()
    config.dtype = "bfloat16"
    with pytest.raises(UnsupportedModelError, match=reason) as raised:
        read_geometry(config)
    assert model_type in str(raised.value)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "something_new"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rotary_embeddings_that_depend_on_the_batch(family: str, rope_type: str) -> None:
    config = make_config(family)
    config.dtype = "float32"
    config.rope_parameters = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match=f"{rope_type}.*position alone"):
        read_geometry(config)


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_rotary_embeddings_that_do_not(rope_type: str) -> None:
    config = make_config("llama")
    config.dtype = "float32"
    config.rope_parameters = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 10000.0}
    read_geometry(config)


def test_one_layer_types_rotary_embedding_is_enough_to_refuse() -> None:
    config = make_config("gemma3")
    config.dtype = "float32"
    config.rope_parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    }
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        read_geometry(config)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("layer_types", ["full_attention"] * 3 + ["conv"], "layer 3 is of type 'conv'"),
        ("layer_types", ["full_attention"] * 3 + ["brand_new"], "layer 3 is of type 'brand_new'"),
        ("use_bidirectional_attention", True, "later tokens"),
        ("is_causal", False, "later tokens"),
        ("add_cross_attention", True, "cross-attention"),
        ("attention_chunk_size", 64, "fixed chunks"),
        ("alibi", True, "ALiBi"),
        ("kv_lora_rank", 32, "latent attention"),
        ("v_head_dim", 8, "values are 8 wide and its keys 16"),
    ],
)
def test_single_fields(field: str, value: Any, reason: str) -> None:
    config = make_config("llama")
    config.dtype = "float32"
    vars(config)[field] = value
    with pytest.raises(UnsupportedModelError, match=reason):
        read_geometry(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_proven_families_are_not_refused(family: str) -> None:
    config = make_config(family)
    config.dtype = "float32"
    read_geometry(config)


def write_config(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_an_unknown_kind_of_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'grotto' is not one that transformers 5"):
        load_config(write_config(tmp_path, model_type="grotto"))


def test_code_in_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "configuration_evil.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "configuration_evil.EvilConfig"}
    with pytest.raises(UnsupportedModelError, match=r"Python code .* never runs"):
        load_config(write_config(tmp_path, model_type="evil", auto_map=auto_map))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "cannot be read as JSON"),
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "model_type"),
        ('{"model_type": 3}', "model_type"),
        ('{"model_type": "llama", "num_hidden_layers": "many"}', "not a valid llama config"),
        ('{"model_type": "llama", "hidden_size": 65}', "not a valid llama config"),
    ],
)
def test_broken_configs(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=words) as raised:
        load_config(tmp_path)
    assert "\n" not in str(raised.value)


def test_missing_folder_config_and_adapters(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no folder"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapter"):
        load_config(tmp_path)
