"""Any layout, prefix and model give the same scales; any bad value is refused by name."""

import math
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint_folders import compressed_tensors, geometry_of, write_folder

from kv8.errors import ScaleError
from kv8.formats.base import FP8_E4M3
from kv8.layer_plan import make_layer_plan
from kv8.scales.checkpoint import read_checkpoint
from kv8.scales.from_python import scales_from_mapping
from kv8.scales.provenance import ScalesFileMetadata
from kv8.scales.resolve import resolve_scales
from kv8.scales.scale import OriginKind
from kv8.scales.scales_file import read_scales_file, write_scales_file
from kv8.scales.validity import LARGEST_SCALE, SMALLEST_SCALE, value_fault

EXAMPLES = settings(max_examples=60)

PREFIXES = st.sampled_from(
    [
        *("model.layers", "layers", "language_model.model.layers", "model.language_model.layers"),
        *("transformer.h", "gpt_neox.layers", "backbone.layers", "model.decoder.layers"),
    ]
)
# One spelling of k, of v and of q each; `None` where a layout has no q scale.
LAYOUTS = st.sampled_from(
    [
        ("self_attn.k_scale", "self_attn.v_scale", "self_attn.q_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale", "self_attn.attn.q_scale"),
        ("attention.k_scale", "attention.v_scale", "attention.q_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", None),
        ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale", None),
        ("self_attn.qkqkv_proj.k_scale", "self_attn.qkqkv_proj.v_scale", None),
        ("mixer.k_proj.k_scale", "mixer.v_proj.v_scale", None),
        ("self_attn.k_cache.scale", "self_attn.v_cache.scale", "self_attn.q.scale"),
        ("attn.k_proj.output_scale", "attn.v_proj.output_scale", "attn.q_proj.output_scale"),
        ("k_scale", "v_scale", "q_scale"),
    ]
)
GOOD = st.floats(SMALLEST_SCALE, LARGEST_SCALE, width=32)
BAD = st.one_of(
    st.floats(width=32).filter(lambda value: value_fault(value) is not None),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1.0]),
)


@EXAMPLES
@given(data=st.data(), prefix=PREFIXES, layout=LAYOUTS, num_layers=st.integers(1, 12))
def test_every_layout_of_every_model_gives_the_same_scales(
    data: st.DataObject, prefix: str, layout: tuple[str, str, str | None], num_layers: int
) -> None:
    """Pitfall 3: architecture and layout do not matter."""
    kv_heads = data.draw(st.integers(1, 4))
    heads = kv_heads * data.draw(st.integers(1, 3))
    per_head = data.draw(st.booleans())
    geometry = geometry_of(num_layers, heads, kv_heads)
    count = {"k": kv_heads, "v": kv_heads, "q": heads}
    tensors, expected = {}, {}
    for layer in range(num_layers):
        for side, tail in zip("kvq", layout, strict=True):
            if tail is None:
                continue
            size = count[side] if per_head else 1
            values = data.draw(st.lists(GOOD, min_size=size, max_size=size))
            shape = (size, 1, 1) if data.draw(st.booleans()) else (size,)
            tensors[f"{prefix}.{layer}.{tail}"] = torch.tensor(values).reshape(shape)
            expected[layer, side] = tuple(values)
    strategy = data.draw(st.sampled_from([None, "attn_head" if per_head else "tensor"]))
    quantization = compressed_tensors(strategy=strategy) if strategy else None
    with TemporaryDirectory() as folder:
        checkpoint = read_checkpoint(write_folder(Path(folder), tensors, quantization), geometry)
    resolved = resolve_scales(geometry, make_layer_plan(geometry, FP8_E4M3, ()), checkpoint)
    found = {
        (layer, side): scale.values
        for layer, scales in resolved.scales
        for side in "kvq"
        if (scale := scales.side(side)) is not None  # type: ignore[arg-type]
    }
    assert found == expected
    assert resolved.fp8_queries is (layout[2] is not None)
    assert checkpoint.tensors == set(tensors)


@EXAMPLES
@given(data=st.data(), value=BAD, num_layers=st.integers(1, 12))
def test_a_bad_value_anywhere_is_refused_with_layer_and_tensor(
    data: st.DataObject, value: float, num_layers: int
) -> None:
    geometry = geometry_of(num_layers)
    layer = data.draw(st.integers(0, num_layers - 1))
    side = data.draw(st.sampled_from("kv"))
    tensors = {
        f"model.layers.{n}.self_attn.{s}_scale": torch.full((2,), 0.5)
        for n in range(num_layers)
        for s in "kv"
    }
    name = f"model.layers.{layer}.self_attn.{side}_scale"
    tensors[name][data.draw(st.integers(0, 1))] = value
    with TemporaryDirectory() as folder:
        checkpoint = read_checkpoint(write_folder(Path(folder), tensors), geometry)
    with pytest.raises(ScaleError) as error:
        resolve_scales(geometry, make_layer_plan(geometry, FP8_E4M3, ()), checkpoint)
    assert f"layer {layer}" in str(error.value)
    assert name in str(error.value)
    assert repr(struct.unpack("<f", struct.pack("<f", value))[0]) in str(error.value)


@EXAMPLES
@given(data=st.data(), num_layers=st.integers(1, 12))
def test_any_subset_of_scales_is_completed_or_refused(data: st.DataObject, num_layers: int) -> None:
    """Pitfalls 2 and 9: exactly the missing (layer, side) pairs are refused, or become 1.0."""
    geometry = geometry_of(num_layers)
    pairs = [(layer, side) for layer in range(num_layers) for side in "kv"]
    inside = data.draw(st.sets(st.sampled_from(pairs), min_size=1))
    outside = data.draw(st.sets(st.sampled_from(pairs), min_size=1))
    tensors = {f"layers.{n}.{s}_scale": torch.tensor([0.5]) for n, s in inside}
    mapping: dict[int, dict[str, float]] = {}
    for layer, side in outside:
        mapping.setdefault(layer, {})[side] = 0.25
    with TemporaryDirectory() as folder:
        checkpoint = read_checkpoint(write_folder(Path(folder), tensors), geometry)
    explicit = scales_from_mapping(mapping, geometry)
    plan = make_layer_plan(geometry, FP8_E4M3, ())
    missing = set(pairs) - inside - outside
    if missing:
        with pytest.raises(ScaleError):
            resolve_scales(geometry, plan, checkpoint, explicit)
    resolved = resolve_scales(geometry, plan, checkpoint, explicit, "default")
    for layer, side in pairs:
        scale = resolved.scales.layer(layer).side(side)  # type: ignore[arg-type]
        assert scale is not None
        if (layer, side) in outside:
            assert (scale.values, scale.origin.kind) == ((0.25,), OriginKind.PYTHON)
        elif (layer, side) in inside:
            assert (scale.values, scale.origin.kind) == ((0.5,), OriginKind.CHECKPOINT)
        else:
            assert (scale.values, scale.origin.kind) == ((1.0,), OriginKind.DEFAULT)
    assert set(resolved.uncalibrated_layers) == {layer for layer, _ in missing}


@EXAMPLES
@given(
    values=st.dictionaries(
        st.integers(0, 5),
        st.dictionaries(st.sampled_from("qkv"), GOOD, min_size=1),
        min_size=1,
    )
)
def test_a_scales_file_keeps_every_bit(values: dict[int, dict[str, float]]) -> None:
    geometry = geometry_of(6)
    scales = scales_from_mapping(values, geometry)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "scales.safetensors"
        write_scales_file(file, scales, ScalesFileMetadata("test", "absmax", 1, "tiny"))
        found = read_scales_file(file, geometry)
    assert found.fingerprint() == scales.fingerprint()
    assert {n: s.k and s.k.values for n, s in found} == {n: s.k and s.k.values for n, s in scales}
