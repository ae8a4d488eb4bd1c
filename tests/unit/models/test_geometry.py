"""What is read from a config, for every family and for the fields that change it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import FAMILIES, LAYERS, VOCAB, WINDOW, TinyModel, make_config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kv8.errors import KV8Error, ModelError
from kv8.geometry import ModelGeometry
from kv8.models.config import load_config
from kv8.models.geometry import read_geometry


def geometry_of(family: str, **overrides: Any) -> ModelGeometry:
    config = make_config(family, **overrides)
    config.dtype = "bfloat16"
    return read_geometry(config)


def windows(geometry: ModelGeometry) -> list[int | None]:
    return [layer.window for layer in geometry.layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_heads_and_layers(family: str) -> None:
    geometry = geometry_of(family)
    assert [layer.layer for layer in geometry.layers] == list(range(LAYERS))
    assert {layer.num_heads for layer in geometry.layers} == {4}
    assert geometry.vocab_size == VOCAB
    assert geometry.max_position == 512
    assert geometry.model_dtype == "bfloat16"
    assert geometry.architecture.endswith("ForCausalLM")


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [None] * 4),
        ("mistral", [WINDOW] * 4),
        ("gemma2", [WINDOW, None, WINDOW, None]),
        ("gemma3", [WINDOW, WINDOW, WINDOW, None]),
        ("gpt_oss", [WINDOW, None, WINDOW, None]),
        ("gemma4", [WINDOW, None, WINDOW, None]),
    ],
)
def test_windows_follow_the_layer_types(family: str, expected: list[int | None]) -> None:
    """Pitfall 58: which layers have a window is read from the config, layer by layer."""
    geometry = geometry_of(family)
    assert windows(geometry) == expected
    types = ["full_attention" if w is None else "sliding_attention" for w in expected]
    assert [layer.type for layer in geometry.layers] == types


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("mixtral", {"sliding_window": 8}, [8] * 4),
        ("phi3", {"sliding_window": 8}, [8] * 4),
        ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": False}, [None] * 4),
        ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}, [8] * 4),
        (
            "qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            [None, None, None, 8],
        ),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, [None] * 4),
    ],
)
def test_flags_that_turn_windows_on_and_off(
    family: str, overrides: dict[str, Any], expected: list[int | None]
) -> None:
    assert windows(geometry_of(family, **overrides)) == expected


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_shared_layers_read_the_last_earlier_layer_of_their_type(family: str) -> None:
    assert [layer.kv_source for layer in geometry_of(family).layers] == [0, 1, 0, 1]
    assert [layer.layer for layer in geometry_of(family).kv_layers] == [0, 1]
    alone = geometry_of(family, num_kv_shared_layers=0)
    assert [layer.kv_source for layer in alone.layers] == [0, 1, 2, 3]


def test_sharing_picks_the_nearest_source() -> None:
    types = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention", "full_attention"]
    geometry = geometry_of("gemma4", num_hidden_layers=6, layer_types=types, num_kv_shared_layers=2)
    assert [layer.kv_source for layer in geometry.layers] == [0, 1, 2, 3, 2, 3]


def test_gemma4_has_other_heads_in_its_global_layers() -> None:
    local, everywhere = geometry_of("gemma4").layers[:2]
    assert (local.num_kv_heads, local.head_dim) == (2, 16)
    assert (everywhere.num_kv_heads, everywhere.head_dim) == (1, 32)
    assert everywhere.values_per_token == 2 * 32


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_kv_heads(kv_heads: int) -> None:
    layer = geometry_of("llama", num_key_value_heads=kv_heads).layers[0]
    assert (layer.num_kv_heads, layer.head_dim) == (kv_heads, 16)


def test_missing_head_dim_is_hidden_size_over_heads() -> None:
    assert geometry_of("llama", head_dim=None, hidden_size=96).layers[0].head_dim == 24


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "num_attention_heads", "max_position_embeddings", "vocab_size"]
)
def test_a_missing_field_is_named(field: str) -> None:
    config = make_config("llama")
    config.dtype = "float32"
    vars(config)[field] = None
    with pytest.raises(ModelError, match=f"no field '{field}'"):
        read_geometry(config)


def test_a_window_layer_without_a_window_is_an_error() -> None:
    config = make_config("gemma3")
    config.dtype = "float32"
    vars(config)["sliding_window"] = None
    with pytest.raises(ModelError, match="sliding_window"):
        read_geometry(config)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ModelError, match="not a multiple of its 3 KV heads"):
        geometry_of("llama", num_key_value_heads=3)


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_impossible_numbers_are_refused(value: Any) -> None:
    config = make_config("llama")
    config.dtype = "float32"
    vars(config)["max_position_embeddings"] = value
    with pytest.raises(ModelError, match="max_position_embeddings"):
        read_geometry(config)


def test_the_dtype_comes_from_the_weights_if_the_config_has_none(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = tiny_model("llama")
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no field 'dtype'"):
        load_config(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert read_geometry(load_config(tmp_path)).model_dtype == "float32"


def test_every_causal_model_transformers_has_is_read_or_refused_with_a_reason() -> None:
    """No config makes the reader fall over, and what it accepts has a plain cache."""
    num_read = 0
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # noqa: BLE001 (some have no usable defaults of their own)
            continue
        config.dtype = "bfloat16"
        try:
            geometry = read_geometry(config)
        except KV8Error as error:
            assert len(str(error)) > 40  # noqa: PT017 (any reason will do here)
            continue
        num_read += 1
        assert all(layer.num_heads % layer.num_kv_heads == 0 for layer in geometry.layers)
    assert num_read > 60
