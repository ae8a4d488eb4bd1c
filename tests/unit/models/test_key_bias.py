"""Which layers will saturate an uncalibrated FP8 cache, told from the key biases."""

from typing import Any

import pytest
import torch
from tests.tiny_models import FAMILIES, make_config, make_model

from kv8.models.geometry import read_geometry
from kv8.models.hook import HookedModel
from kv8.models.key_bias import layers_with_huge_key_bias

E4M3_MAX, E5M2_MAX = 448.0, 57344.0


def build(family: str, **overrides: Any) -> HookedModel:
    config = make_config(family, **overrides)
    config.dtype = "float32"
    return HookedModel(make_model(config), read_geometry(config))


def test_the_layers_with_a_huge_bias_are_named() -> None:
    """Pitfall 39: Qwen2's first and last layers, told before anything is served."""
    model = build("qwen2")
    assert layers_with_huge_key_bias(model, E4M3_MAX) == {}
    with torch.no_grad():
        for number in (0, 3):
            model.attention_modules[number].k_proj.bias.fill_(900 / 32**0.5)
    found = layers_with_huge_key_bias(model, E4M3_MAX)
    assert sorted(found) == [0, 3]
    assert found[0] == pytest.approx(900)
    assert layers_with_huge_key_bias(model, E5M2_MAX) == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_suspected_without_cause(family: str) -> None:
    assert layers_with_huge_key_bias(build(family), E4M3_MAX) == {}


def test_huge_query_and_value_biases_do_not_count() -> None:
    model = build("qwen2")
    with torch.no_grad():
        for name in ("q_proj", "v_proj"):
            getattr(model.attention_modules[1], name).bias.fill_(1e4)
    assert layers_with_huge_key_bias(model, E4M3_MAX) == {}


@pytest.mark.parametrize(("rows", "found"), [((64, 96), [2]), ((0, 64), []), ((96, 128), [])])
def test_fused_projections_are_read_where_the_keys_are(
    rows: tuple[int, int], found: list[int]
) -> None:
    model = build("phi3")
    fused = model.attention_modules[2].qkv_proj
    fused.bias = torch.nn.Parameter(torch.zeros(128), requires_grad=False)
    fused.bias[slice(*rows)] = 100.0
    assert sorted(layers_with_huge_key_bias(model, E4M3_MAX)) == found
