"""How many sequences may be in work, and when one that finds no room should come back."""

import math
from time import monotonic

from kv8.server.refusals import QueueFullError, TooManySequencesError

_LONGEST_WAIT = 60  # seconds a client is sent away for at most


class Admission:
    """Bounds what waits in memory: ``max_num_seqs`` sequences run, ``max_queued`` more may wait.

    Attributes:
        num_refused: requests that found the queue full.
    """

    def __init__(self, *, max_num_seqs: int, max_queued: int) -> None:
        self._capacity = max_num_seqs + max_queued
        self._last_end: float | None = None
        self._gap = 0.0  # seconds from one sequence's end to the next, recent ones weighing most
        self.num_refused = 0

    def require_room(self, num_sequences: int, *, in_work: int) -> None:
        """Refuse a request of ``num_sequences`` that would be one too many.

        Raises:
            QueueFullError: it finds no room now.
            TooManySequencesError: it never would.
        """
        if num_sequences > self._capacity:
            raise TooManySequencesError(
                f"The request asks for {num_sequences} completions (prompts times n); this server "
                f"has at most {self._capacity} in work (--max-num-seqs and --max-queued)."
            )
        missing = in_work + num_sequences - self._capacity
        if missing > 0:
            self.num_refused += 1
            wait = self.retry_after(missing)
            raise QueueFullError(
                f"The queue is full: {in_work} of {self._capacity} sequences are in work. Try "
                f"again in {wait} seconds.",
                retry_after=wait,
            )

    def ended(self, num_sequences: int) -> None:
        """Note that sequences have ended just now."""
        now = monotonic()
        if self._last_end is not None:
            gap = (now - self._last_end) / num_sequences
            self._gap += 0.2 * (gap - self._gap)
        self._last_end = now

    def retry_after(self, num_sequences: int) -> int:
        """Return whole seconds after which so many sequences should have ended."""
        return min(max(math.ceil(self._gap * num_sequences), 1), _LONGEST_WAIT)
