"""How long requests wait for their tokens, in plain numbers, always on."""

import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from kv8.engine.request import Request

# Upper bounds in seconds. Dense where a person notices a difference: a tenth of a second until
# text appears, a fiftieth between tokens.
_WAIT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
    960, 1920, 7680,
)  # fmt: skip


class Histogram:
    """Durations counted by range.

    Args:
        bounds: upper bounds of the ranges in seconds, rising, each inclusive; one more range takes
            what is beyond the last.

    Attributes:
        counts: observations in each range, one more than there are bounds.
        total: sum of all observations in seconds.
    """

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        """How many durations were counted."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Mean duration in seconds; `None` before the first."""
        return self.total / self.count if self.count else None


@dataclass
class Latencies:
    """What requests waited for, since the engine started; each of ``n`` completions is one.

    Attributes:
        time_to_first_token: from a request's arrival to its first token.
        inter_token: from one token of a request to its next.
        time_per_output_token: of each completed request, the mean of its inter-token times.
        request: of each completed request, from arrival to end.
    """

    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(_WAIT))
    inter_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN))
    request: Histogram = field(default_factory=lambda: Histogram(_REQUEST))

    def token(self, request: Request) -> None:
        """Note that ``request`` has just gained a token."""
        now = time.monotonic()
        if request.last_token_at is None:
            self.time_to_first_token.observe(now - request.arrived_at)
            request.first_token_at = now
        else:
            self.inter_token.observe(now - request.last_token_at)
        request.last_token_at = now

    def completed(self, request: Request) -> None:
        """Note that ``request`` has just ended by itself, not by an abort or a failure."""
        self.request.observe(time.monotonic() - request.arrived_at)
        first, last = request.first_token_at, request.last_token_at
        gaps = request.num_output_tokens - 1
        if first is not None and last is not None and gaps > 0:
            self.time_per_output_token.observe((last - first) / gaps)
