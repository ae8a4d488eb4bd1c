"""The smallest and largest value of each sample, in the samples' order.

Only a statistic that depends on that order needs them; see `kv8.calibration.moving_average`.
"""

from collections.abc import Mapping

import torch


class SampleRanges:
    """Signed extremes of one side of one layer, sample by sample and head by head.

    Attributes:
        samples: numbers of the samples seen.
        low: float32 [samples, heads], the smallest value of each.
        high: float32 [samples, heads], the largest.
    """

    def __init__(self, num_heads: int) -> None:
        self.samples: list[int] = []
        self.low = torch.empty(0, num_heads)
        self.high = torch.empty(0, num_heads)

    def add(self, samples: list[int], low: torch.Tensor, high: torch.Tensor) -> None:
        """Take in extremes [len(samples), heads]; a sample may come in several pieces."""
        low, high = low.to("cpu", torch.float32), high.to("cpu", torch.float32)
        rows = {sample: row for row, sample in enumerate(self.samples)}
        fresh = [i for i, sample in enumerate(samples) if sample not in rows]
        for i, sample in enumerate(samples):
            if (row := rows.get(sample)) is not None:
                self.low[row] = torch.minimum(self.low[row], low[i])
                self.high[row] = torch.maximum(self.high[row], high[i])
        self.samples += [samples[i] for i in fresh]
        self.low = torch.cat([self.low, low[fresh]])
        self.high = torch.cat([self.high, high[fresh]])

    def merge(self, other: "SampleRanges") -> None:
        """Add what ``other`` saw."""
        self.add(other.samples, other.low, other.high)

    def in_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return smallest and largest values, rows in the order of the samples' numbers."""
        order = torch.tensor(self.samples, dtype=torch.int64).argsort()
        return self.low[order], self.high[order]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return everything as tensors, samples in order."""
        low, high = self.in_order()
        return {"samples": torch.tensor(sorted(self.samples)), "low": low, "high": high}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "SampleRanges":
        """Return what `tensors` took apart."""
        low = tensors["low"]
        ranges = cls(low.shape[1])
        ranges.add(tensors["samples"].tolist(), low, tensors["high"])
        return ranges
