"""A histogram of magnitudes fine enough that every order-independent statistic is read off it.

A bin is a magnitude rounded to bfloat16, so values of a bfloat16 model are kept exactly, and
float16 and float32 ones to within a share of 2⁻⁸. Counts are integers: histograms of parts of the
data add up to that of the whole, whatever the order, the threads or the batches were.
"""

import math
from collections.abc import Mapping
from typing import Final

import torch

from kv8.formats.base import KVFormat
from kv8.formats.encode import decode, encode

# Exponents a bin of its own is kept for. No scale that is fit for a tensor distinguishes what lies
# below, and no tensor that a model survives reaches what lies above; both are counted in the
# outermost bins.
_SMALLEST_EXPONENT: Final = -40
_LARGEST_EXPONENT: Final = 39
_MANTISSAS: Final = 128  # of bfloat16
_FIRST_BITS: Final = (127 + _SMALLEST_EXPONENT) * _MANTISSAS

# Zero, then one a magnitude.
NUM_BINS: Final = 1 + (_LARGEST_EXPONENT - _SMALLEST_EXPONENT + 1) * _MANTISSAS


def bin_values() -> torch.Tensor:
    """Return the magnitude each bin stands for: float32 [`NUM_BINS`], ascending from 0."""
    bits = torch.arange(_FIRST_BITS - 1, _FIRST_BITS + NUM_BINS - 1, dtype=torch.int16)
    values = bits.view(torch.bfloat16).to(torch.float32)
    values[0] = 0.0
    return values


class MagnitudeHistogram:
    """Counts of the magnitudes a tensor had, head by head.

    Args:
        num_heads: H for queries, K for keys and values.
        device: where to count; `observe` takes values from there.

    Attributes:
        counts: int64 [heads, `NUM_BINS`].
        absmax: float32 [heads], the largest magnitude, exactly; NaN or infinite if a value was.
        num_tokens: tokens observed.
    """

    def __init__(self, num_heads: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(num_heads, NUM_BINS, dtype=torch.int64, device=device)
        self.absmax = torch.zeros(num_heads, dtype=torch.float32, device=device)
        self.num_tokens = 0

    @property
    def num_heads(self) -> int:
        """Heads that are counted apart."""
        return len(self.counts)

    @property
    def num_values(self) -> int:
        """Values observed in each head."""
        return int(self.counts[0].sum())

    @property
    def finite(self) -> bool:
        """Whether no value was NaN or infinite."""
        return bool(self.absmax.isfinite().all())

    def observe(self, values: torch.Tensor, absmax: torch.Tensor | None = None) -> None:
        """Count ``values`` [T, heads, D], bfloat16, float16 or float32, and only read them.

        ``absmax`` [heads] is their largest magnitude in each head, if the caller knows it.
        """
        num_tokens, num_heads, _ = values.shape
        assert num_heads == self.num_heads, f"{num_heads} heads, not {self.num_heads}"
        if num_tokens == 0:
            return
        if absmax is None:
            absmax = values.abs().amax(dim=(0, 2))
        self.absmax = torch.maximum(self.absmax, absmax.to(torch.float32))
        # Bfloat16 without its sign, as a number, grows with the magnitude.
        bits = values.to(torch.bfloat16).contiguous().view(torch.int16) & 0x7FFF
        is_not_zero = bits != 0
        bits.sub_(_FIRST_BITS - 1).clamp_(1, NUM_BINS - 1).mul_(is_not_zero)
        first = torch.arange(num_heads, dtype=torch.int32, device=bits.device) * NUM_BINS
        bins = (bits + first.unsqueeze(1)).flatten()
        if bins.numel() < self.counts.numel():
            one = torch.ones(1, dtype=torch.int64, device=bins.device)
            self.counts.view(-1).index_add_(0, bins, one.expand(bins.numel()))
        else:
            counted = torch.bincount(bins, minlength=self.counts.numel())
            self.counts += counted.view_as(self.counts)
        self.num_tokens += num_tokens

    def merge(self, other: "MagnitudeHistogram") -> None:
        """Add what ``other`` observed."""
        self.counts += other.counts.to(self.counts.device)
        self.absmax = torch.maximum(self.absmax, other.absmax.to(self.absmax.device))
        self.num_tokens += other.num_tokens

    def pooled(self) -> "MagnitudeHistogram":
        """Return one head that stands for all of them together."""
        pool = MagnitudeHistogram(1, self.counts.device)
        pool.counts = self.counts.sum(dim=0, keepdim=True)
        pool.absmax = self.absmax.amax(dim=0, keepdim=True)
        pool.num_tokens = self.num_tokens
        return pool

    def quantile(self, share: float) -> torch.Tensor:
        """Return the least magnitude that ``share`` of a head's values do not exceed.

        Args:
            share: more than 0, at most 1.

        Returns:
            float32 [heads], each a value's bin; 0 where nothing was observed.
        """
        assert 0 < share <= 1, f"share {share}"
        # Rounded first: 0.9 * 10 is a little more than 9 in floating point, and means 9.
        ranks = [
            max(1, math.ceil(round(share * count, 6))) for count in self.counts.sum(1).tolist()
        ]
        wanted = torch.tensor(ranks, device=self.counts.device).unsqueeze(1)
        found = torch.searchsorted(self.counts.cumsum(dim=1), wanted).clamp_(max=NUM_BINS - 1)
        values = bin_values().to(self.counts.device)[found.squeeze(1)]
        return torch.where(self.absmax > 0, values.minimum(self.absmax), 0.0)

    def saturated_share(self, scale: torch.Tensor, kv_format: KVFormat) -> torch.Tensor:
        """Return the share of values beyond the format's largest under ``scale``.

        Args:
            scale: float32 [heads] or [1].
            kv_format: what they would be stored in.

        Returns:
            float64 [heads], from 0 to 1; 0 where nothing was observed.
        """
        values, counts = self._occupied()
        scaled = values / scale.to(values.device).unsqueeze(1)
        return _share(counts, scaled > kv_format.finite_max)

    def underflowed_share(self, scale: torch.Tensor, kv_format: KVFormat) -> torch.Tensor:
        """Return the share of values that are not zero and would be stored as zero.

        Arguments and result as for `saturated_share`.
        """
        values, counts = self._occupied()
        scaled = values / scale.to(values.device).unsqueeze(1)
        # Half the smallest code lies between it and zero; the tie goes to the even one, zero.
        return _share(counts, (scaled <= kv_format.smallest / 2) & (values != 0))

    def squared_error(self, scale: torch.Tensor, kv_format: KVFormat) -> torch.Tensor:
        """Return the summed squares of what storing under ``scale`` would change.

        Arguments as for `saturated_share`; returns float64 [heads].
        """
        values, counts = self._occupied()
        per_head = scale.to(values.device).unsqueeze(1)
        stored = decode(encode(values, per_head, kv_format), per_head, kv_format)
        return ((stored.double() - values.double()).square() * counts).sum(dim=1)

    def sum_of_squares(self) -> torch.Tensor:
        """Return the summed squares of all values, float64 [heads]."""
        values, counts = self._occupied()
        return (values.double().square() * counts).sum(dim=1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return everything as tensors on the CPU, empty bins at both ends left out."""
        used = self.counts.any(dim=0).nonzero().flatten().tolist()
        first, stop = (used[0], used[-1] + 1) if used else (0, 0)
        return {
            "counts": self.counts[:, first:stop].cpu().contiguous(),
            "absmax": self.absmax.cpu(),
            "extent": torch.tensor([first, self.num_tokens]),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "MagnitudeHistogram":
        """Return the histogram that `tensors` took apart."""
        counts = tensors["counts"]
        first, num_tokens = tensors["extent"].tolist()
        histogram = cls(len(counts))
        histogram.counts[:, first : first + counts.shape[1]] = counts
        histogram.absmax = tensors["absmax"].clone()
        histogram.num_tokens = num_tokens
        return histogram

    def _occupied(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the magnitudes that occurred, float32 [heads, n], and how often, [heads, n].

        A float32 value may have been rounded up to its bin's; no magnitude is beyond the largest.
        """
        used = self.counts.any(dim=0).nonzero().flatten()
        values = bin_values().to(self.counts.device)[used]
        return values.minimum(self.absmax.unsqueeze(1)), self.counts[:, used]


def _share(counts: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    total = counts.sum(dim=1).clamp(min=1)
    return (counts * event).sum(dim=1).double() / total
