"""One side of one layer in the report: its range, its scale, and what that does to other text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kv8.calibration.histogram import MagnitudeHistogram
from kv8.calibration.observations import Observations
from kv8.formats.base import KVFormat
from kv8.geometry import LayerGeometry
from kv8.scales.scale import Scale, Side

_HIGH_PERCENTILE: Final = 99.9


@dataclass(frozen=True)
class SideReport:
    """One side (q, k or v) of one layer.

    Attributes:
        layer: the model's layer number.
        type: the layer type as the model's config spells it.
        side: q, k or v.
        amax: largest magnitude of each head (H for q, K for k and v) in the text that was measured.
        p99_9: of each head, the magnitude that 99.9 % of its values do not exceed.
        scale: one value, or one a head.
        change: largest difference between a scale of one half of the data and the same scale of the
            other, as a share of the smaller; `None` where there are no two halves.
        saturated_share: share of held-out values beyond the format's largest under the scale;
            `None` here and below where no text was held out.
        underflowed_share: share of held-out values that are not zero and would be stored as zero.
        error: root of the mean squared difference that storing makes to held-out values, as a share
            of their root mean square, in the head where it is largest.
    """

    layer: int
    type: str
    side: Side
    amax: tuple[float, ...]
    p99_9: tuple[float, ...]
    scale: tuple[float, ...]
    change: float | None
    saturated_share: float | None
    underflowed_share: float | None
    error: float | None


@dataclass(frozen=True)
class _Judged:
    """What a scale does to held-out values; nothing is known where there are none."""

    saturated: float | None = None
    underflowed: float | None = None
    error: float | None = None

    @classmethod
    def of(cls, kept: MagnitudeHistogram | None, scale: Scale, kv_format: KVFormat) -> "_Judged":
        if kept is None:
            return cls()
        values = torch.tensor(scale.values, dtype=torch.float32)
        # Every head has as many values as every other: the mean of their shares is that of all.
        return cls(
            saturated=float(kept.saturated_share(values, kv_format).mean()),
            underflowed=float(kept.underflowed_share(values, kv_format).mean()),
            error=relative_error(kept, values, kv_format),
        )


def report_side(
    observations: Observations,
    layer: LayerGeometry,
    side: Side,
    scale: Scale,
    halves: Sequence[Scale],
    kv_format: KVFormat,
) -> SideReport:
    """Return one row of the report.

    Args:
        observations: what was seen of the layer.
        layer: which.
        side: q, k or v.
        scale: its scale.
        halves: the scales that the two halves of the data give, or nothing.
        kv_format: what the scales are for.
    """
    measured = observations.histogram(layer.layer, side)
    assert measured is not None, f"scales without observations of {side} in layer {layer.layer}"
    judged = _Judged.of(observations.histogram(layer.layer, side, ("held_out",)), scale, kv_format)
    return SideReport(
        layer=layer.layer,
        type=layer.type,
        side=side,
        amax=tuple(measured.absmax.tolist()),
        p99_9=tuple(measured.quantile(_HIGH_PERCENTILE / 100).tolist()),
        scale=scale.values,
        change=_change(halves),
        saturated_share=judged.saturated,
        underflowed_share=judged.underflowed,
        error=judged.error,
    )


def relative_error(
    histogram: MagnitudeHistogram, scale: torch.Tensor, kv_format: KVFormat
) -> float:
    """Return the largest head's root mean squared error over its root mean square, 0 if all is 0.

    ``scale`` is float32 [heads] or [1].
    """
    squares = histogram.sum_of_squares()
    errors = histogram.squared_error(scale, kv_format)
    return float(torch.where(squares > 0, errors / squares, 0.0).max().sqrt())


def _change(halves: Sequence[Scale]) -> float | None:
    if not halves:
        return None
    one, other = (half.values for half in halves)
    return max(max(a, b) / min(a, b) - 1.0 for a, b in zip(one, other, strict=True))
