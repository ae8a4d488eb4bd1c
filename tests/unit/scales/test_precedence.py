"""The whole decision about a checkpoint, as the engine takes it: format, then scales."""

from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint_folders import compressed_tensors, geometry_of, scale_tensors, write_folder

from kv8.errors import KV8Error
from kv8.layer_plan import make_layer_plan, resolve_cache_format
from kv8.scales.checkpoint import read_checkpoint
from kv8.scales.resolve import ResolvedScales, resolve_scales

GEOMETRY = geometry_of()


def decide(folder: Path, option: str) -> tuple[str, ResolvedScales]:
    checkpoint = read_checkpoint(folder, GEOMETRY)
    format_, _ = resolve_cache_format(option, checkpoint.declaration, GEOMETRY.model_dtype)
    plan = make_layer_plan(GEOMETRY, format_, ())
    return format_.name, resolve_scales(GEOMETRY, plan, checkpoint)


@pytest.mark.parametrize(
    ("option", "declares", "brings", "format_name", "origin"),
    [
        ("auto", False, False, "bfloat16", None),
        ("auto", True, True, "fp8_e4m3", "checkpoint"),
        ("auto", True, False, None, None),
        ("bfloat16", False, False, "bfloat16", None),
        ("bfloat16", True, True, "bfloat16", None),
        ("bfloat16", True, False, "bfloat16", None),
        ("fp8", False, False, "fp8_e4m3", "default"),
        ("fp8", True, True, "fp8_e4m3", "checkpoint"),
        ("fp8", True, False, None, None),
        # Scales that are there but not declared are used when FP8 is asked for.
        ("auto", False, True, "bfloat16", None),
        ("fp8", False, True, "fp8_e4m3", "checkpoint"),
    ],
)
def test_three_flags_by_three_checkpoints(
    tmp_path: Path,
    option: str,
    declares: bool,
    brings: bool,
    format_name: str | None,
    origin: str | None,
) -> None:
    """Pitfalls 13, 2: flag auto/bf16/fp8 by declaration none/with scales/without scales.

    ``None`` as the format stands for a refusal.
    """
    tensors = scale_tensors() if brings else None
    folder = write_folder(tmp_path, tensors, compressed_tensors() if declares else None)
    if format_name is None:
        with pytest.raises(KV8Error, match="no k or v scale in layers 0-3"):
            decide(folder, option)
        return
    chosen, resolved = decide(folder, option)
    assert chosen == format_name
    scale = resolved.scales.layer(0).k
    assert (scale.origin.kind.value if scale else None) == origin


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_bits", 4),
        ("type", "int"),
        ("strategy", "channel"),
        ("dynamic", True),
        ("symmetric", False),
    ],
)
@pytest.mark.parametrize("option", ["auto", "fp8"])
def test_an_unsupported_scheme_does_not_start(
    tmp_path: Path, field: str, value: Any, option: str
) -> None:
    """Pitfall 14: one wrong field at a time, refused by name before weights are read."""
    folder = write_folder(tmp_path, scale_tensors(), compressed_tensors(**{field: value}))
    with pytest.raises(KV8Error, match=f"kv_cache_scheme.{field} is {value!r}"):
        decide(folder, option)
    assert decide(folder, "bfloat16") == ("bfloat16", ResolvedScales())


@pytest.mark.parametrize("option", ["fp8", "fp8_e5m2"])
def test_quantized_weights_without_cache_scales_run_uncalibrated(
    tmp_path: Path, option: str
) -> None:
    """Pitfalls 10, 68: quantized weights without KV scales start, with every layer at 1.0.

    That weights are quantized is no reason to refuse e5m2.
    """
    weights = {"model.layers.0.self_attn.k_proj.weight_scale": 0.1}
    for quantization in ({"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4}):
        folder = write_folder(tmp_path, weights, quantization)
        _, resolved = decide(folder, option)
        assert resolved.uncalibrated_layers == (0, 1, 2, 3)
        assert len(resolved.warnings) == 1
        assert decide(folder, "auto") == ("bfloat16", ResolvedScales())
