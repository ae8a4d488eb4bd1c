"""From what was observed of one side of one layer to its scale, by the statistic's name.

All but ``llmcompressor`` are read off the histogram and so do not depend on the order of the data.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from kv8.calibration.histogram import MagnitudeHistogram
from kv8.calibration.moving_average import moving_average_scale
from kv8.calibration.ranges import SampleRanges
from kv8.calibration.statistic_names import DEFAULT_PERCENTILE
from kv8.formats.base import KVFormat
from kv8.scales.validity import SMALLEST_SCALE, Strategy

# Candidates for the least squared error: the scale that fits everything, and smaller ones in
# 32 steps an octave down to a sixteenth. A floating-point format gains nothing by shrinking its
# scale further: its precision is relative, only what saturates grows.
_STEPS_PER_OCTAVE: Final = 32
_OCTAVES: Final = 4


@dataclass(frozen=True)
class SideObserved:
    """One side of one layer.

    Attributes:
        histogram: of all its magnitudes, by head.
        ranges: its samples' extremes.
        dtype: the type the values had.
    """

    histogram: MagnitudeHistogram
    ranges: SampleRanges
    dtype: torch.dtype

    def heads(self, strategy: Strategy) -> MagnitudeHistogram:
        """Return the histogram whose heads are what a scale is for: each head, or all at once."""
        return self.histogram if strategy == "attn_head" else self.histogram.pooled()


@dataclass(frozen=True)
class Settings:
    """What a statistic depends on besides the data.

    Attributes:
        kv_format: what the scale is for.
        strategy: a scale for each head, or one for all.
        percentile: percent of the values that the ``percentile`` statistic keeps from saturating.
    """

    kv_format: KVFormat
    strategy: Strategy
    percentile: float = DEFAULT_PERCENTILE


def fitting_scale(magnitude: torch.Tensor, kv_format: KVFormat) -> torch.Tensor:
    """Return the least float32 scale under which ``magnitude`` does not saturate.

    That is ``magnitude / largest``, one float32 step more where the division rounds so that the
    quotient would exceed the largest value. Where it is smaller than any scale can be (a head that
    is all zero), the scale is float32's epsilon.

    Args:
        magnitude: float32, any shape, finite and not negative.
        kv_format: what the scale is for.
    """
    scale = magnitude / kv_format.finite_max
    too_small = magnitude / scale > kv_format.finite_max
    scale = torch.where(too_small, scale.nextafter(torch.full_like(scale, torch.inf)), scale)
    return torch.where(scale < SMALLEST_SCALE, torch.finfo(torch.float32).eps, scale)


def candidate_scales(absmax: torch.Tensor, kv_format: KVFormat) -> torch.Tensor:
    """Return the scales ``mse`` chooses from, float32 [candidates, heads], largest first."""
    steps = torch.arange(_STEPS_PER_OCTAVE * _OCTAVES + 1, dtype=torch.float64)
    factors = torch.exp2(-steps / _STEPS_PER_OCTAVE).to(torch.float32)
    scales = factors.unsqueeze(1) * fitting_scale(absmax, kv_format)
    return scales.clamp(min=SMALLEST_SCALE)


def _absmax(observed: SideObserved, settings: Settings) -> torch.Tensor:
    return fitting_scale(observed.heads(settings.strategy).absmax, settings.kv_format)


def _percentile(observed: SideObserved, settings: Settings) -> torch.Tensor:
    histogram = observed.heads(settings.strategy)
    magnitude = histogram.quantile(settings.percentile / 100)
    # Where nearly all values are zero, so is the percentile, and only the others need a scale.
    magnitude = torch.where(magnitude > 0, magnitude, histogram.absmax)
    return fitting_scale(magnitude, settings.kv_format)


def _least_squared_error(observed: SideObserved, settings: Settings) -> torch.Tensor:
    histogram = observed.heads(settings.strategy)
    candidates = candidate_scales(histogram.absmax, settings.kv_format)
    errors = torch.stack([histogram.squared_error(s, settings.kv_format) for s in candidates])
    # The first of equals is the largest scale, which saturates least.
    best = errors.argmin(dim=0, keepdim=True)
    return candidates.gather(0, best).squeeze(0)


def _llmcompressor(observed: SideObserved, settings: Settings) -> torch.Tensor:
    return moving_average_scale(
        observed.ranges,
        observed.dtype,
        settings.kv_format,
        per_head=settings.strategy == "attn_head",
    )


# Each returns float32 [heads] with the strategy attn_head, [1] with tensor.
STATISTICS: Final[Mapping[str, Callable[[SideObserved, Settings], torch.Tensor]]] = {
    "absmax": _absmax,
    "percentile": _percentile,
    "mse": _least_squared_error,
    "llmcompressor": _llmcompressor,
}
