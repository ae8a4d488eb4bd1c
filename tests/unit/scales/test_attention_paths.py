"""Where a scale belongs, told from the names of the weights beside it."""

import pytest
from tests.checkpoint_folders import geometry_of

from kv8.errors import ScaleError
from kv8.scales.attention_paths import attention_paths
from kv8.scales.names import resolve_name

GEOMETRY = geometry_of(2)


@pytest.mark.parametrize(
    ("path", "child"),
    [
        ("model.layers.{}.self_attn", "k_proj.weight"),
        ("language_model.model.layers.{}.self_attn", "q_norm.weight"),
        ("model.language_model.layers.{}.self_attn", "qkv_proj.weight"),
        ("transformer.h.{}.attn", "c_attn.bias"),
        ("gpt_neox.layers.{}.attention", "query_key_value.weight"),
        ("backbone.layers.{}.mixer", "k_proj.weight"),
    ],
)
def test_the_module_is_found_under_any_prefix(path: str, child: str) -> None:
    names = [f"{path.format(n)}.{child}" for n in (0, 1)]
    names += [f"model.layers.{n}.post_attention_layernorm.weight" for n in (0, 1)]
    names += ["vision_tower.encoder.layers.0.self_attn.k_proj.weight", "lm_head.weight"]
    names += ["model.layers.0.cross_attn.k_proj.weight", "mtp.layers.0.self_attn.k_proj.weight"]
    found = attention_paths(names, GEOMETRY)
    assert found == {n: path.format(n) for n in (0, 1)}
    # What is written there is a name that kv8 itself reads.
    for number, module in found.items():
        bound = resolve_name(f"{module}.k_scale")
        assert bound is not None
        assert (bound.layer, bound.sides) == (number, ("k",))


def test_a_layer_without_or_with_two_is_refused_by_number() -> None:
    one = ["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(ScaleError, match=r"layer 1 belong: found no attention module"):
        attention_paths(one, GEOMETRY)
    two = [f"{p}.layers.{n}.self_attn.k_proj.weight" for p in ("model", "other") for n in (0, 1)]
    with pytest.raises(ScaleError, match=r"layers 0, 1 belong: found model\.layers\.0\.self_attn"):
        attention_paths(two, GEOMETRY)
