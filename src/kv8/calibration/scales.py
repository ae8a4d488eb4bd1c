"""From observations to the scales of a whole model, each with its origin."""

from collections.abc import Iterable, Sequence

import torch

from kv8.calibration.observations import MEASURED, Observations, Part
from kv8.calibration.statistic_names import (
    DEFAULT_PERCENTILE,
    check_statistic,
    describe_statistic,
)
from kv8.calibration.statistics import STATISTICS, Settings, SideObserved
from kv8.errors import ScaleError
from kv8.formats.base import KVFormat
from kv8.geometry import ModelGeometry
from kv8.scales.collect import by_layer
from kv8.scales.scale import SIDES, ModelScales, Origin, OriginKind, Scale, Side
from kv8.scales.validity import Strategy, values_fault


def make_scales(
    observations: Observations,
    geometry: ModelGeometry,
    kv_format: KVFormat,
    *,
    strategy: Strategy = "tensor",
    statistic: str = "absmax",
    percentile: float = DEFAULT_PERCENTILE,
    sides: Sequence[Side] = SIDES,
    parts: Iterable[Part] = MEASURED,
) -> ModelScales:
    """Return a scale for each side of each layer that has a use for it.

    Keys and values belong to the layer that stores them, so a layer that reads another's has none
    of its own; queries are every layer's.

    Args:
        observations: what was seen; held-out samples have no part in it.
        geometry: the model.
        kv_format: what the scales are for.
        strategy: one scale a tensor, or one a head.
        statistic: a name of `STATISTICS`.
        percentile: percent of the values that ``percentile`` keeps from saturating.
        sides: which sides to give scales.
        parts: the parts of the data to use; one half, to see how much depends on it.

    Raises:
        RequestError: statistic, strategy or percentile are not known.
        ScaleError: a layer was not observed, or a value was not finite; names it.
    """
    check_statistic(statistic, strategy, percentile)
    observations.check_finite()
    observations.check_complete(geometry)
    parts = tuple(parts)
    num_tokens = sum(observations.num_tokens[part] for part in parts)
    kind = f"{observations.source} tokens" if observations.source else "tokens"
    detail = f"{num_tokens:,} {kind}, {describe_statistic(statistic, percentile)}"
    settings = Settings(kv_format, strategy, percentile)
    dtype: torch.dtype = getattr(torch, observations.dtype)
    scales: dict[tuple[int, Side], Scale] = {}
    for layer in geometry.layers:
        for side in sides:
            if side != "q" and not layer.owns_kv:
                continue
            histogram = observations.histogram(layer.layer, side, parts)
            ranges = observations.ranges(layer.layer, side, parts)
            if histogram is None or ranges is None:
                raise ScaleError(f"No sample of {', '.join(parts)} reached layer {layer.layer}.")
            observed = SideObserved(histogram, ranges, dtype)
            values = tuple(STATISTICS[statistic](observed, settings).tolist())
            fault = values_fault(values)
            if fault:
                raise ScaleError(f"Layer {layer.layer}, {side}: the measured scale's {fault}.")
            # A head that was always zero has no range to measure; its scale is a constant.
            silent = int((observed.heads(strategy).absmax == 0).sum())
            zero = f", {silent} of {len(values)} all zero" if silent else ""
            origin = Origin(OriginKind.CALIBRATION, detail + zero)
            scales[layer.layer, side] = Scale(values, origin)
    return ModelScales(by_layer(scales), made_for=kv_format.name)
