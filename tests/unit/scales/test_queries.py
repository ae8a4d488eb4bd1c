"""When queries are quantized too, and which q scales are believed."""

from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint_folders import (
    ATTENTION_GROUP,
    compressed_tensors,
    geometry_of,
    scale_tensors,
    write_folder,
)

from kv8.errors import ScaleError
from kv8.formats.base import FP8_E4M3
from kv8.layer_plan import make_layer_plan
from kv8.scales.checkpoint import read_checkpoint
from kv8.scales.from_python import scales_from_mapping
from kv8.scales.resolve import ResolvedScales, resolve_scales
from kv8.scales.scale import OriginKind

GEOMETRY = geometry_of()
DECLARED = {**compressed_tensors(), "config_groups": {"group_0": ATTENTION_GROUP}}


def q_scales(values: dict[int, float]) -> dict[str, float]:
    return {f"model.layers.{n}.self_attn.q_scale": value for n, value in values.items()}


def resolve(
    folder: Path, q: dict[int, float], quantization: Any = None, **options: Any
) -> ResolvedScales:
    tensors = {**scale_tensors(), **q_scales(q)}
    checkpoint = read_checkpoint(write_folder(folder, tensors, quantization), GEOMETRY)
    plan = make_layer_plan(GEOMETRY, FP8_E4M3, options.pop("skip", ()))
    explicit = options.pop("explicit", None)
    given = None if explicit is None else scales_from_mapping(explicit, GEOMETRY)
    return resolve_scales(GEOMETRY, plan, checkpoint, given, **options)


ALL = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
NONE: dict[int, float] = {}
SOME = {0: 0.1, 1: 0.2}
GARBAGE = {0: 0.1, 1: 0.0, 2: -3.0, 3: 1.79e38}


def test_calibrated_q_scales_switch_fp8_attention_on(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, ALL, DECLARED)
    assert resolved.fp8_queries
    assert [resolved.scales.layer(n).q.values[0] for n in range(4)] == pytest.approx(  # type: ignore[union-attr]
        [0.1, 0.2, 0.3, 0.4]
    )
    assert any("FP8 attention is on" in message for message in resolved.messages)
    assert resolved.warnings == ()


def test_without_q_scales_queries_stay_native_and_the_log_says_why(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, NONE, compressed_tensors())
    assert not resolved.fp8_queries
    assert resolved.scales.layer(0).q is None
    assert any("no calibrated q scales" in message for message in resolved.messages)
    assert resolved.warnings == ()


def test_native_overrides_good_q_scales(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, ALL, DECLARED, query_dtype="native")
    assert not resolved.fp8_queries
    assert resolved.scales.layer(0).q is None
    assert any("query_dtype=native" in message for message in resolved.messages)


def test_garbage_gives_native_queries_and_one_warning_naming_layers_and_cause(
    tmp_path: Path,
) -> None:
    resolved = resolve(tmp_path, GARBAGE, DECLARED)
    assert not resolved.fp8_queries
    assert all(scales.q is None for _, scales in resolved.scales)
    (warning,) = resolved.warnings
    for part in ("layers 1-3", "model.layers.1.self_attn.q_scale", "0.14.0.1", "k and v"):
        assert part in warning
    assert resolve(tmp_path, GARBAGE, query_dtype="native").warnings == ()


def test_garbage_is_refused_when_fp8_queries_were_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ScaleError, match=r"layers 1-3.*q_scale.*0\.14\.0\.1"):
        resolve(tmp_path, GARBAGE, DECLARED, query_dtype="fp8")
    with pytest.raises(ScaleError):
        resolve(tmp_path, GARBAGE, DECLARED, query_dtype="fp8", missing_scales="default")


def test_one_bad_q_scale_spoils_those_that_look_fine(tmp_path: Path) -> None:
    """A skipped layer's garbage still shows that the producer wrote garbage."""
    assert not resolve(tmp_path, GARBAGE, DECLARED, skip=["1-3"]).fp8_queries


def test_explicit_q_scales_replace_garbage(tmp_path: Path) -> None:
    mine = {n: {"q": 0.5} for n in range(4)}
    resolved = resolve(tmp_path, GARBAGE, DECLARED, explicit=mine)
    assert resolved.fp8_queries
    assert resolved.warnings == ()
    assert not resolve(tmp_path, GARBAGE, DECLARED, explicit={0: {"q": 0.5}}).fp8_queries


@pytest.mark.parametrize(("q", "declared"), [(SOME, False), (NONE, True)])
def test_q_scales_that_were_lost_warn_or_refuse(
    tmp_path: Path, q: dict[int, float], declared: bool
) -> None:
    quantization = DECLARED if declared else None
    resolved = resolve(tmp_path, q, quantization)
    assert not resolved.fp8_queries
    assert ("layers 0-3" if declared else "layers 2, 3") in resolved.warnings[0]
    with pytest.raises(ScaleError, match="needs a q scale"):
        resolve(tmp_path, q, quantization, query_dtype="fp8")
    forced = resolve(tmp_path, q, quantization, query_dtype="fp8", missing_scales="default")
    assert forced.fp8_queries
    assert "1.0" in forced.warnings[0]


def test_q_scales_of_skipped_layers_are_not_needed(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, SOME, skip=["2,3"])
    assert resolved.fp8_queries
    assert resolved.scales.layer(2).q is None


def test_fp8_queries_can_be_asked_for_uncalibrated(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, NONE, query_dtype="fp8")
    assert resolved.fp8_queries
    scale = resolved.scales.layer(3).q
    assert scale is not None
    assert (scale.values, scale.origin.kind) == ((1.0,), OriginKind.DEFAULT)
    assert "uncalibrated q scale 1.0" in resolved.warnings[0]
