"""The statistic of llm-compressor's default observer, ``minmax``, for comparison with that library.

Smallest and largest values of each sample, apart, follow the samples in order with a moving
average: m ← 0.99·m + 0.01·x from the first sample on, every step rounded to the model's dtype. The
scale is max(|low|, |high|) / largest, in the same dtype, and the dtype's epsilon if that is 0.
So it depends on the order, forgets what the first sample lacks, and lets later outliers saturate.
"""

from typing import Final

import torch

from kv8.calibration.ranges import SampleRanges
from kv8.formats.base import KVFormat

_WEIGHT: Final = 0.01  # averaging_constant's default


def moving_average_scale(
    ranges: SampleRanges, dtype: torch.dtype, kv_format: KVFormat, *, per_head: bool
) -> torch.Tensor:
    """Return the scale, float32 [heads] or [1], as that library would store it.

    Args:
        ranges: of at least one sample.
        dtype: the model's, in which everything is rounded.
        kv_format: what the scale is for.
        per_head: whether each head has a scale of its own.
    """
    low, high = (extremes.to(dtype) for extremes in ranges.in_order())
    if not per_head:
        low, high = low.amin(dim=1, keepdim=True), high.amax(dim=1, keepdim=True)
    low, high = _average(low).clamp(max=0), _average(high).clamp(min=0)
    # That library divides by half the distance between a format's ends, which is its largest value.
    scale = torch.maximum(low.abs(), high.abs()) / torch.tensor(kv_format.finite_max, dtype=dtype)
    return torch.where(scale == 0, torch.finfo(dtype).eps, scale).to(torch.float32)


def _average(rows: torch.Tensor) -> torch.Tensor:
    """Return the moving average over dimension 0, rounded to the rows' dtype at every operation."""
    average = rows[0]
    for row in rows[1:]:
        average = average * (1.0 - _WEIGHT) + row * _WEIGHT
    return average
