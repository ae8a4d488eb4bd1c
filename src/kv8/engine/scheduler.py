"""Which requests compute which tokens in the next step. Plain Python over the cache manager.

The rules, in order:

1. Requests run in order of arrival, and nobody is admitted past a waiting one: a stream of short
   requests cannot starve a long one, nor the other way round.
2. Every decoding request gets its one token each step; what is left of the token budget goes to
   prompts, oldest first, in chunks.
3. A request is admitted only when the cache has room for all the tokens it has now, so that
   admitting it cannot by itself push another out.
4. When a running request needs a block and there is none, the newest running request gives up all
   of its blocks and waits again. Its tokens are kept and recomputed later. The oldest is therefore
   never disturbed, and every request comes to be the oldest.
"""

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

from kv8.cache.manager import CacheManager
from kv8.engine.request import Request, RequestState
from kv8.errors import EngineError
from kv8.outputs import FinishReason

PROMPT_LOGITS_CHUNK = 256  # rows of logits a chunk may ask for; 256 x 256k float32 is 256 MiB

_by_arrival = attrgetter("sequence")


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens ``start .. start + num_tokens - 1`` of one request, computed in one step."""

    request: Request
    start: int
    num_tokens: int

    @property
    def stop(self) -> int:
        """Tokens of the request in the cache once the chunk is computed."""
        return self.start + self.num_tokens

    @property
    def reaches_end(self) -> bool:
        """Whether the chunk computes the last known token, whose logits give the next one."""
        return self.stop == self.request.num_tokens


class Scheduler:
    """Requests between arrival and end.

    Args:
        cache: whose blocks the requests compete for.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens computed in one step.
    """

    def __init__(
        self, cache: CacheManager, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._cache = cache
        self._budget = max_num_batched_tokens
        # More sequences than tokens would leave some without their token in every step.
        self._max_running = min(max_num_seqs, max_num_batched_tokens)
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._free_when_blocked: int | None = None
        self.num_preemptions = 0

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold blocks, oldest first."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests that hold no blocks, oldest first."""
        return tuple(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._running or self._waiting)

    def add(self, request: Request) -> None:
        """Put a new request in the queue."""
        insort(self._waiting, request, key=_by_arrival)

    def schedule(self) -> list[ScheduledChunk]:
        """Return the next step's work, oldest request first; blocks for it are reserved.

        Raises:
            EngineError: a request cannot run although the cache is otherwise empty.
        """
        budget = self._budget
        shares: dict[int, int] = {}
        for request in self._running:
            if request.num_pending_tokens == 1:
                shares[request.sequence] = 1
                budget -= 1
        for request in self._running:
            if request.num_pending_tokens > 1:
                shares[request.sequence] = share = self._chunk_length(request, budget)
                budget -= share
        preemptions = self.num_preemptions
        chunks = self._reserve_running(shares)
        if self.num_preemptions == preemptions:
            self._admit(chunks, budget)
        if not chunks and self.has_unfinished:
            raise EngineError(
                "No request can run: the cache has no room for the oldest one although nothing "
                "else holds blocks."
            )
        return chunks

    def commit(self, chunk: ScheduledChunk) -> None:
        """Record that ``chunk`` is computed and its keys and values are stored."""
        request = chunk.request
        request.num_computed_tokens = chunk.stop
        self._cache.commit(request.sequence, request.token_ids, chunk.stop)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End ``request`` and free what it holds; does nothing if it has ended already."""
        if request.finished:
            return
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            self._cache.release(request.sequence)
        else:
            self._waiting.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self._free_when_blocked = None

    def preempt_all(self) -> None:
        """Take the blocks of every running request; each recomputes its tokens later."""
        while self._running:
            self._preempt(self._running[-1])

    def check_invariants(self) -> None:
        """Raise `AssertionError` if queues, states and counts contradict each other."""
        for queue, state in (
            (self._running, RequestState.RUNNING),
            (self._waiting, RequestState.WAITING),
        ):
            order = [request.sequence for request in queue]
            assert order == sorted(set(order)), f"{state.value} out of order: {order}"
            for request in queue:
                assert request.state is state, f"{request.request_id} is {request.state}"
                assert 0 <= request.num_computed_tokens < request.num_tokens
        assert all(request.num_computed_tokens == 0 for request in self._waiting)
        assert len(self._running) <= self._max_running

    def _chunk_length(self, request: Request, budget: int) -> int:
        if request.wants_prompt_logits:
            budget = min(budget, PROMPT_LOGITS_CHUNK)
        return min(budget, request.num_pending_tokens)

    def _reserve_running(self, shares: dict[int, int]) -> list[ScheduledChunk]:
        """Reserve blocks for the running requests, oldest first; the newest make room."""
        chunks = []
        for request in self.running:
            share = shares.get(request.sequence, 0)
            if request.state is not RequestState.RUNNING or share == 0:
                continue
            stop = request.num_computed_tokens + share
            while not self._cache.reserve(request.sequence, stop):
                victim = self._running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            else:
                chunks.append(ScheduledChunk(request, request.num_computed_tokens, share))
        return chunks

    def _admit(self, chunks: list[ScheduledChunk], budget: int) -> None:
        """Start waiting requests in order of arrival until one does not fit."""
        # Nothing was freed since the last one did not fit: trying again would fail again.
        blocked = self._free_when_blocked
        if blocked is not None and self._cache.num_free_blocks <= blocked:
            return
        self._free_when_blocked = None
        while budget > 0 and len(self._running) < self._max_running:
            request = next((r for r in self._waiting if not r.follows_unready_leader), None)
            if request is None:
                return
            num_cached = self._cache.start(
                request.sequence, request.token_ids, reuse_prefix=not request.wants_prompt_logits
            )
            request.num_computed_tokens = num_cached
            share = self._chunk_length(request, budget)
            fits = self._cache.can_hold(request.sequence, request.num_tokens)
            if not fits or not self._cache.reserve(request.sequence, num_cached + share):
                request.num_computed_tokens = 0
                self._cache.release(request.sequence)
                self._free_when_blocked = self._cache.num_free_blocks
                return
            if request.num_cached_tokens is None:
                request.num_cached_tokens = num_cached
            self._waiting.remove(request)
            insort(self._running, request, key=_by_arrival)
            request.state = RequestState.RUNNING
            chunks.append(ScheduledChunk(request, num_cached, share))
            budget -= share

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._cache.release(request.sequence)
        request.state = RequestState.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, request, key=_by_arrival)
        self._free_when_blocked = None
