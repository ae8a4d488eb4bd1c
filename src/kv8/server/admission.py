"""How many sequences may be in work, and when one that finds no room should come back."""

import math
from time import monotonic

from kv8.server.refusals import QueueFullError, TooManySequencesError

_LONGEST_WAIT = 60  # seconds a client is sent away for at most
_WEIGHT = 0.2  # of the latest gap in the running mean


class Admission:
    """Bounds what waits in memory: ``max_num_seqs`` sequences run, ``max_queued`` more may wait.

    Attributes:
        num_sequences: how many are in work.
        num_refused: requests that found the queue full.
    """

    def __init__(self, *, max_num_seqs: int, max_queued: int) -> None:
        self.num_sequences = 0
        self.num_refused = 0
        self._capacity = max_num_seqs + max_queued
        self._gap = 0.0  # mean seconds from one sequence's end to the next while there was work
        self._last_end: float | None = None

    def enter(self, num_sequences: int) -> None:
        """Give a request of ``num_sequences`` its place.

        Raises:
            QueueFullError: there is none now.
            TooManySequencesError: there never would be.
        """
        if num_sequences > self._capacity:
            raise TooManySequencesError(
                f"n: the request asks for {num_sequences} completions (prompts times n), and this "
                f"server has at most {self._capacity} in work (--max-num-seqs and --max-queued)."
            )
        missing = self.num_sequences + num_sequences - self._capacity
        if missing > 0:
            self.num_refused += 1
            wait = min(max(math.ceil(self._gap * missing), 1), _LONGEST_WAIT)
            raise QueueFullError(
                f"The queue is full: {self.num_sequences} of {self._capacity} sequences are in "
                f"work. Try again in {wait} s.",
                retry_after=wait,
            )
        self.num_sequences += num_sequences

    def leave(self, num_sequences: int) -> None:
        """Take back a request's place."""
        self.num_sequences -= num_sequences
        now = monotonic()
        if self._last_end is not None:
            gap = (now - self._last_end) / num_sequences
            self._gap += _WEIGHT * (gap - self._gap)
        # With nothing in work, the time until the next end says nothing of how fast work goes.
        self._last_end = now if self.num_sequences else None
