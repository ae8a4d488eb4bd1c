"""Timing: work done in turns, the warm-up apart, medians with their spread."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kv8.kernels.clock import seconds_of


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one thing, in the order they were made."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one: what a typical repeat takes."""
        return statistics.median(self.values)

    @property
    def least(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def most(self) -> float:
        """The largest."""
        return max(self.values)


def in_turns(
    work: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    each_round: Callable[[], object] = lambda: None,
    device: torch.device | None = None,
) -> dict[str, Samples]:
    """Return seconds of each piece of work.

    They take turns, so that a machine whose speed drifts favours none of them; the first round is
    the warm-up and is not counted. ``each_round`` is called after every round. The clock is that
    of ``device``.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    for round_number in range(repeats + 1):
        for name, run in work.items():
            elapsed = seconds_of(run, device)
            if round_number > 0:
                seconds[name].append(elapsed)
        each_round()
    return {name: Samples(tuple(values)) for name, values in seconds.items()}


def speedup(seconds: Mapping[str, Samples], slow: str, *fast: str) -> float:
    """Return how many times as fast the slowest of ``fast`` is as ``slow``, by medians."""
    return min(seconds[slow].median / seconds[name].median for name in fast)


def joined(samples: Sequence[Samples]) -> Samples:
    """Return the sums of measurements made in the same rounds."""
    return Samples(tuple(map(sum, zip(*(each.values for each in samples), strict=True))))
