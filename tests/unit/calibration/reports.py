"""Observations and reports for tests, without a model: values drawn for each layer and head."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kv8.calibration.observations import Observations, Part
from kv8.calibration.packing import digest
from kv8.calibration.report import CalibrationReport, Conditions, make_report
from kv8.calibration.scales import make_scales
from kv8.calibration.sources import Samples
from kv8.calibration.statistic_names import DEFAULT_PERCENTILE
from kv8.formats.base import FP8_E4M3, KVFormat
from kv8.geometry import LayerGeometry, ModelGeometry
from kv8.scales.scale import SIDES, Side
from kv8.scales.validity import Strategy

TOKENS = 32  # of each sample


def make_geometry(
    num_layers: int = 2,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    types: Sequence[str] = ("full_attention",),
    reads: Mapping[int, int] | None = None,
) -> ModelGeometry:
    """Return a model's geometry; ``types`` repeat, ``reads`` maps sharing layers to sources."""
    reads = reads or {}
    layers = tuple(
        LayerGeometry(
            layer=i,
            type=types[i % len(types)],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=8,
            window=None,
            kv_source=reads.get(i, i),
        )
        for i in range(num_layers)
    )
    return ModelGeometry("TestForCausalLM", "float32", 512, 260, layers)


def observe(
    geometry: ModelGeometry,
    parts: Sequence[Part] = ("first", "second", "held_out"),
    *,
    ranges: Mapping[tuple[int, Side], Any] | None = None,
    by_part: Mapping[Part, float] | None = None,
    seed: int = 0,
) -> Observations:
    """Return observations of one sample for each of ``parts``.

    Magnitudes are drawn evenly up to ``ranges[layer, side]`` (one number or one a head; 1 unless
    given) times ``by_part[part]``, and the first token has exactly that.
    """
    generator = torch.Generator().manual_seed(seed)
    observations = Observations("float32")
    for number, part in enumerate(parts):
        for layer in geometry.layers:
            for side in SIDES:
                if side != "q" and not layer.owns_kv:
                    continue
                heads = layer.num_heads if side == "q" else layer.num_kv_heads
                top = torch.as_tensor((ranges or {}).get((layer.layer, side), 1.0))
                top = top.broadcast_to(heads).view(1, heads, 1) * (by_part or {}).get(part, 1.0)
                values = torch.rand(TOKENS, heads, layer.head_dim, generator=generator) * 2 - 1
                values[0] = 1.0
                observations.observe(part, layer.layer, side, values * top, [number], [TOKENS])
        observations.count(part, TOKENS, 1)
    return observations


def report_on(
    observations: Observations,
    geometry: ModelGeometry,
    *,
    strategy: Strategy = "tensor",
    statistic: str = "absmax",
    percentile: float = DEFAULT_PERCENTILE,
    kv_format: KVFormat = FP8_E4M3,
) -> CalibrationReport:
    """Return the report on the scales that ``observations`` give."""
    num = sum(observations.num_samples.values())
    sequences = tuple(tuple(range(TOKENS)) for _ in range(num))
    samples = Samples(sequences, 1_000, num * TOKENS, "texts.txt", digest(sequences))
    conditions = Conditions("tiny", samples, kv_format, strategy, statistic, percentile)
    how: dict[str, Any] = {"strategy": strategy, "statistic": statistic, "percentile": percentile}
    scales = make_scales(observations, geometry, kv_format, **how)
    return make_report(observations, scales, geometry, conditions)
