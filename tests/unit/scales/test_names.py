"""The table of spellings: every layout of every producer, and what is none of its business."""

import pytest

from kv8.errors import ScaleError
from kv8.scales.names import SPELLINGS, Role, resolve_name

PREFIXES = (
    "model.layers.",
    "layers.",
    "language_model.model.layers.",
    "model.language_model.layers.",
    "transformer.h.",
    "gpt_neox.layers.",
    "backbone.layers.",
    "model.decoder.layers.",
    "transformer.blocks.",
)
LAYOUTS = {
    "self_attn.k_scale": ("k",),
    "self_attn.v_scale": ("v",),
    "self_attn.q_scale": ("q",),
    "self_attn.attn.k_scale": ("k",),
    "self_attn.kv_scale": ("k", "v"),
    "self_attn.attn.kv_scale": ("k", "v"),
    "self_attn.k_proj.k_scale": ("k",),
    "self_attn.v_proj.v_scale": ("v",),
    "self_attn.k_proj.v_scale": ("v",),
    "self_attn.q_proj.q_scale": ("q",),
    "self_attn.qkv_proj.k_scale": ("k",),
    "self_attn.qkv_proj.v_scale": ("v",),
    "self_attn.qkqkv_proj.k_scale": ("k",),
    "attn.Wqkv.v_scale": ("v",),
    "attention.query_key_value.k_scale": ("k",),
    "self_attn.q.scale": ("q",),
    "self_attn.k_cache.scale": ("k",),
    "self_attn.v_cache.scale": ("v",),
    "self_attn.k_proj.output_scale": ("k",),
    "self_attn.v_proj.output_scale": ("v",),
    "self_attn.q_proj.output_scale": ("q",),
    "mixer.k_proj.k_scale": ("k",),
    "mixer.v_scale": ("v",),
    "attention.k_scale": ("k",),
    "attn.attention.v_scale": ("v",),
    "self_attn.self_attn.k_scale": ("k",),
    "self_attn.mla_attn.mla_attn.k_scale": ("k",),
    "k_scale": ("k",),
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("tail", "sides"), LAYOUTS.items())
def test_every_layout_resolves_under_every_prefix(
    prefix: str, tail: str, sides: tuple[str, ...]
) -> None:
    """Pitfalls 3, 5: one resolver for all architectures and layouts, before any other mapping.

    Per-projection and fused names are resolved as they stand in the file.
    """
    bound = resolve_name(f"{prefix}17.{tail}")
    assert bound is not None
    assert (bound.layer, bound.sides, bound.spelling.role) == (17, sides, Role.SCALE)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.example)
def test_each_row_of_the_table_explains_its_own_example(spelling) -> None:
    bound = resolve_name(f"model.layers.3.{spelling.example}")
    assert bound is not None
    assert bound.spelling is spelling


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "lm_head.weight_scale",
        "model.layers.0.mlp.down_proj.weight_scale",
        "model.layers.0.mlp.down_proj.input_scale",
        "model.layers.0.mlp.down_proj.output_scale",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.0.self_attn.k_proj.weight_scale_inv",
        "model.layers.0.self_attn.k_proj.weight_zero_point",
        "model.layers.0.self_attn.k_proj.input_scale",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.0.self_attn.o_proj.output_scale",
        "model.layers.0.self_attn.k_norm.scale",
        "model.layers.0.self_attn.sinks",
        "model.layers.0.self_attn.per_dim_scale",
        "logit_scale",
    ],
)
def test_scales_of_weights_and_inputs_pass_by(name: str) -> None:
    """Pitfall 10: the scales of FP8 weights are not mistaken for those of the cache."""
    assert resolve_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.k_scale",
        "model.layers.0.self_attn.kv_cache.scale",
        "model.layers.0.self_attn.k_cache.zero_point",
        "model.layers.0.self_attn.k_scales",
        "model.layers.0.self_attn.k_scale_inv",
        "model.layers.0.self_attn.key_scale",
        "model.layers.0.self_attn.k_global_scale",
        "model.layers.0.self_attn.kv_proj.output_scale",
        "model.layers.0.self_attn.qkv_proj.output_scale",
        "model.layers.0.self_attn.k_proj.q_scale",
        "model.layers.0.cross_attn.k_scale",
        "model.layers.0.encoder_attn.v_scale",
        "model.layers.self_attn.k_scale",
        "vision_tower.layers.0.self_attn.k_scale",
        "model.visual.blocks.0.attn.k_scale",
        "mtp.layers.0.self_attn.k_scale",
        "k_scale",
        "model.k_scale",
    ],
)
def test_what_looks_like_a_cache_scale_but_fits_no_row_is_refused_by_name(name: str) -> None:
    """Pitfall 1: no name ending is ever ignored; what cannot be bound is named."""
    with pytest.raises(ScaleError) as error:
        resolve_name(name)
    assert name in str(error.value)
    assert "self_attn.k_scale" in str(error.value)  # says what would have been understood


@pytest.mark.parametrize(
    "tail", ["self_attn.k_zero_point", "self_attn.attn.v_zero_point", "self_attn.k_proj.k_bias"]
)
def test_zero_points_and_affine_biases_are_offsets(tail: str) -> None:
    bound = resolve_name(f"model.layers.2.{tail}")
    assert bound is not None
    assert bound.spelling.role is Role.OFFSET


def test_output_scales_are_known_to_be_measured_before_rope() -> None:
    after = resolve_name("model.layers.2.self_attn.k_scale")
    before = resolve_name("model.layers.2.self_attn.k_proj.output_scale")
    assert after is not None
    assert before is not None
    assert before.spelling.before_rope
    assert not after.spelling.before_rope
