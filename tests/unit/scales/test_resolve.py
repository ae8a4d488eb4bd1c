"""From what is known of scales to what every quantized layer uses, or a refusal by name."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint_folders import compressed_tensors, geometry_of, scale_tensors, write_folder

from kv8.errors import RequestError, ScaleError
from kv8.formats.base import BFLOAT16, FP8_E4M3, FP8_E5M2
from kv8.layer_plan import make_layer_plan
from kv8.scales.checkpoint import CheckpointScales, read_checkpoint
from kv8.scales.from_python import scales_from_mapping
from kv8.scales.resolve import ResolvedScales, resolve_scales
from kv8.scales.scale import OriginKind

P = "model.layers.{}.self_attn."
GEOMETRY = geometry_of()
EVERY_LAYER = range(4)


def checkpoint_of(
    folder: Path, tensors: dict[str, Any], quantization: Any = None
) -> CheckpointScales:
    return read_checkpoint(write_folder(folder, tensors, quantization), GEOMETRY)


def resolve(checkpoint: CheckpointScales | None = None, **options: Any) -> ResolvedScales:
    format = options.pop("format", FP8_E4M3)  # noqa: A001
    geometry = options.pop("geometry", GEOMETRY)
    plan = make_layer_plan(geometry, format, options.pop("skip", ()))
    explicit = options.pop("explicit", None)
    given = None if explicit is None else scales_from_mapping(explicit, geometry)
    return resolve_scales(geometry, plan, checkpoint or CheckpointScales(), given, **options)


def kinds(resolved: ResolvedScales, side: str) -> list[str | None]:
    found = [resolved.scales.layer(n).side(side) for n in EVERY_LAYER]  # type: ignore[arg-type]
    return [scale.origin.kind.name if scale else None for scale in found]


def without(tensors: dict[str, float], *lost: str) -> dict[str, float]:
    return {name: value for name, value in tensors.items() if not name.endswith(lost)}


def test_given_scales_that_are_incomplete_are_to_be_completed() -> None:
    with pytest.raises(ScaleError, match=r"kv_scales was given, but .* layers 1-3\. Complete them"):
        resolve(explicit={0: {"k": 0.1, "v": 0.1}})


def test_a_complete_checkpoint_is_used_as_it_is(tmp_path: Path) -> None:
    """Pitfall 1: the effective scales equal those in the file."""
    resolved = resolve(checkpoint_of(tmp_path, scale_tensors(), compressed_tensors()))
    for number in EVERY_LAYER:
        scales = resolved.scales.layer(number)
        assert scales.k is not None
        assert scales.v is not None
        assert scales.k.values == (pytest.approx(0.05),)
        assert scales.v.values == (pytest.approx(0.08),)
        assert scales.q is None
    assert kinds(resolved, "k") == ["CHECKPOINT"] * 4
    assert resolved.warnings == ()
    assert resolved.uncalibrated_layers == ()
    assert any(
        "model.layers.0.self_attn.k_scale in model.safetensors" in m for m in resolved.messages
    )


def test_nobody_spoke_of_scales_so_the_cache_is_uncalibrated_and_says_so() -> None:
    """Pitfall 10: missing scales give the uncalibrated path and its warning, for every layer."""
    resolved = resolve()
    assert kinds(resolved, "k") == kinds(resolved, "v") == ["DEFAULT"] * 4
    assert resolved.uncalibrated_layers == (0, 1, 2, 3)
    (warning,) = resolved.warnings
    assert "layers 0-3" in warning
    assert "uncalibrated" in warning


@pytest.mark.parametrize("declared", [True, False])
def test_a_lost_layer_is_refused_by_number(tmp_path: Path, declared: bool) -> None:
    """Pitfall 2: a declared static scheme and a layer without a scale do not start.

    Nor does a checkpoint that has scales for some layers without declaring them.
    """
    tensors = without(scale_tensors(), "2.self_attn.k_scale", "2.self_attn.v_scale")
    checkpoint = checkpoint_of(tmp_path, tensors, compressed_tensors() if declared else None)
    with pytest.raises(ScaleError, match=r"no k or v scale in layer 2\b") as error:
        resolve(checkpoint)
    assert "missing_scales=default" in str(error.value)
    resolved = resolve(checkpoint, missing_scales="default")
    assert kinds(resolved, "k") == ["CHECKPOINT", "CHECKPOINT", "DEFAULT", "CHECKPOINT"]
    assert resolved.uncalibrated_layers == (2,)
    assert "layer 2" in resolved.warnings[0]


def test_a_skipped_layer_needs_no_scale(tmp_path: Path) -> None:
    tensors = without(scale_tensors(), "2.self_attn.k_scale", "2.self_attn.v_scale")
    resolved = resolve(checkpoint_of(tmp_path, tensors, compressed_tensors()), skip=["2"])
    assert kinds(resolved, "k") == ["CHECKPOINT", "CHECKPOINT", None, "CHECKPOINT"]


@pytest.mark.parametrize(
    ("present", "missing"), [("kv", None), ("k", "v"), ("v", "k"), ("", "k or v")]
)
def test_one_side_two_sides_no_side(tmp_path: Path, present: str, missing: str | None) -> None:
    """Pitfall 9: both, none, K only and V only each have an outcome, named by layer and side."""
    lost = tuple(f"1.self_attn.{side}_scale" for side in "kv" if side not in present)
    checkpoint = checkpoint_of(
        tmp_path, without(scale_tensors(), *lost) if lost else scale_tensors()
    )
    if missing is None:
        assert resolve(checkpoint).warnings == ()
        return
    with pytest.raises(ScaleError, match=rf"no {missing} scale in layer 1\b"):
        resolve(checkpoint)
    resolved = resolve(checkpoint, missing_scales="default")
    for side in "kv":
        scale = resolved.scales.layer(1).side(side)  # type: ignore[arg-type]
        assert scale is not None
        assert (scale.origin.kind is OriginKind.DEFAULT) is (side not in present)


@pytest.mark.parametrize("missing_scales", ["error", "default"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e-40])
def test_a_bad_scale_is_refused_whatever_missing_scales_says(
    tmp_path: Path, value: float, missing_scales: str
) -> None:
    tensors = {**scale_tensors(), P.format(2) + "v_scale": value}
    checkpoint = checkpoint_of(tmp_path, tensors, compressed_tensors())
    with pytest.raises(ScaleError) as error:
        resolve(checkpoint, missing_scales=missing_scales)
    for part in ("layer 2", "model.layers.2.self_attn.v_scale", "kv_scales", "skip-layers 2"):
        assert part in str(error.value)
    resolve(checkpoint, skip=["2"])
    resolve(checkpoint, explicit={2: {"v": 0.5}})


def test_many_bad_scales_are_all_named_but_few_are_shown(tmp_path: Path) -> None:
    tensors = scale_tensors(k=0.0)
    with pytest.raises(ScaleError, match=r"layers 0-3.*and 1 more"):
        resolve(checkpoint_of(tmp_path, tensors))


def test_explicit_scales_win_by_layer_and_side(tmp_path: Path) -> None:
    """Pitfall 7: scales from outside go through the same path and take effect."""
    checkpoint = checkpoint_of(tmp_path, scale_tensors(), compressed_tensors())
    resolved = resolve(checkpoint, explicit={1: {"k": 0.5}})
    assert kinds(resolved, "k") == ["CHECKPOINT", "PYTHON", "CHECKPOINT", "CHECKPOINT"]
    assert kinds(resolved, "v") == ["CHECKPOINT"] * 4
    scale = resolved.scales.layer(1).k
    assert scale is not None
    assert scale.values == (0.5,)


def test_explicit_scales_must_be_complete_together_with_the_checkpoint() -> None:
    with pytest.raises(ScaleError, match=r"kv_scales was given.*layers 1-3"):
        resolve(explicit={0: {"k": 0.5, "v": 0.5}})
    everything = {n: {"k": 0.5, "v": 0.25} for n in EVERY_LAYER}
    assert kinds(resolve(explicit=everything), "v") == ["PYTHON"] * 4


def test_an_unquantized_cache_says_nothing_of_scales(tmp_path: Path) -> None:
    """Pitfall 12: with a 16-bit cache no line mentions KV scales, whatever the checkpoint has."""
    for tensors in (
        scale_tensors(),
        scale_tensors(k=math.nan),
        without(scale_tensors(), "v_scale"),
    ):
        checkpoint = checkpoint_of(tmp_path, tensors, compressed_tensors())
        resolved = resolve(checkpoint, format=BFLOAT16)
        assert resolved == ResolvedScales()
    assert resolve(skip=["0-3"]) == ResolvedScales()


def test_what_could_have_no_effect_is_refused() -> None:
    with pytest.raises(RequestError, match=r"kv_scales was given.*kv_cache_dtype=fp8"):
        resolve(format=BFLOAT16, explicit={0: {"k": 0.5}})
    with pytest.raises(RequestError, match=r"query_dtype=fp8 was given"):
        resolve(format=BFLOAT16, query_dtype="fp8")


def test_e4m3_scales_are_used_for_e5m2_and_it_is_said(tmp_path: Path) -> None:
    """Pitfalls 40, 68: a scale given for e5m2 is used, in a message that names its tensor.

    Uncalibrated e5m2 warns like e4m3.
    """
    resolved = resolve(checkpoint_of(tmp_path, scale_tensors()), format=FP8_E5M2)
    scale = resolved.scales.layer(0).k
    assert scale is not None
    assert scale.values == (pytest.approx(0.05),)
    assert any(
        "fp8_e5m2" in m and "model.layers.0.self_attn.k_scale" in m for m in resolved.messages
    )
    uncalibrated = resolve(format=FP8_E5M2)
    assert "uncalibrated" in uncalibrated.warnings[0]
    assert not any("fp8_e5m2" in message for message in uncalibrated.messages)


def test_scales_made_for_the_wider_format_are_refused_in_the_narrower() -> None:
    mine = scales_from_mapping({n: {"k": 0.5, "v": 0.25} for n in EVERY_LAYER}, GEOMETRY)
    wide = replace(mine, made_for=FP8_E5M2.name)
    plan = make_layer_plan(GEOMETRY, FP8_E4M3, ())
    with pytest.raises(
        ScaleError, match=r"made for fp8_e5m2.*beyond 1/128.*kv_cache_dtype=fp8_e4m3"
    ):
        resolve_scales(GEOMETRY, plan, CheckpointScales(), wide)
    plan = make_layer_plan(GEOMETRY, FP8_E5M2, ())
    messages = resolve_scales(GEOMETRY, plan, CheckpointScales(), wide).messages
    assert not any("made for fp8_e4m3" in message for message in messages)


def test_warnings_of_given_scales_are_passed_on() -> None:
    mine = scales_from_mapping({n: {"k": 0.5, "v": 0.25} for n in EVERY_LAYER}, GEOMETRY)
    plan = make_layer_plan(GEOMETRY, FP8_E4M3, ())
    given = replace(mine, warnings=("other weights",))
    assert resolve_scales(GEOMETRY, plan, CheckpointScales(), given).warnings == ("other weights",)


def test_layers_that_share_kv_inherit_its_scales(tmp_path: Path) -> None:
    geometry = geometry_of(sources={2: 0, 3: 1})
    folder = write_folder(tmp_path, scale_tensors(2))
    resolved = resolve(read_checkpoint(folder, geometry), geometry=geometry)
    assert kinds(resolved, "k") == ["CHECKPOINT", "CHECKPOINT", "INHERITED", "INHERITED"]
    mine, source = resolved.scales.layer(3).v, resolved.scales.layer(1).v
    assert mine is not None
    assert source is not None
    assert mine.values == source.values
    assert str(mine.origin) == "inherited: layer 1"


def test_notes_are_told_only_when_the_checkpoints_scales_are_used(tmp_path: Path) -> None:
    tensors = {f"{P.format(n)}{s}_proj.output_scale": 0.1 for n in EVERY_LAYER for s in "kv"}
    checkpoint = checkpoint_of(tmp_path, tensors)
    assert any("rotary" in message for message in resolve(checkpoint).messages)
    mine = {n: {"k": 0.5, "v": 0.25} for n in EVERY_LAYER}
    assert not any("rotary" in message for message in resolve(checkpoint, explicit=mine).messages)


def test_new_numbers_change_the_fingerprint_and_new_origins_do_not(tmp_path: Path) -> None:
    """Pitfalls 47 and 48: stored blocks are tied to the scales they were stored under."""
    first = resolve(checkpoint_of(tmp_path, scale_tensors(k=0.5, v=0.25))).scales.fingerprint()
    same = {n: {"k": 0.5, "v": 0.25} for n in EVERY_LAYER}
    assert resolve(explicit=same).scales.fingerprint() == first
    for layer, side in ((0, "k"), (3, "v")):
        changed = {n: dict(sides) for n, sides in same.items()}
        changed[layer][side] = 0.75
        assert resolve(explicit=changed).scales.fingerprint() != first
    swapped = {n: {"k": 0.25, "v": 0.5} for n in EVERY_LAYER}
    assert resolve(explicit=swapped).scales.fingerprint() != first
    with_q = {n: {"k": 0.5, "v": 0.25, "q": 0.5} for n in EVERY_LAYER}
    assert resolve(explicit=with_q).scales.fingerprint() != first
    per_head = {n: {"k": [0.5, 0.5], "v": 0.25} for n in EVERY_LAYER}
    assert resolve(explicit=per_head).scales.fingerprint() != first
