"""The one object the scheduler asks for cache memory: find, reserve, publish, release. No tensors.

Life of a sequence::

    start    finds the longest stored prefix and takes references to its blocks
    reserve  owns blocks for the tokens of the next step (all of them, or none are taken)
    commit   after the step: publishes full blocks, lets go of blocks no later query can see
    release  drops everything; published blocks stay findable until their memory is needed

A preempted sequence is released and started again: what is left of its blocks is found again.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from kv8.cache.blocks import BlockPool
from kv8.cache.capacity import group_blocks, peak_blocks
from kv8.cache.layout import CacheLayout
from kv8.cache.prefix import PrefixIndex, extend_digest, find_prefix, root_digest
from kv8.cache.sequence import SequenceState


@dataclass
class CacheStats:
    """Running counts since the manager was made.

    Attributes:
        queries: sequences started (a preempted one counts again when it resumes).
        query_tokens: tokens of those sequences.
        hit_tokens: of these, tokens found in the cache.
        evictions: cached blocks taken for other contents.
    """

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0


class CacheManager:
    """Block tables, reference counts and prefix reuse over ``num_blocks`` blocks.

    Args:
        layout: groups, windows and block size.
        num_blocks: N, at least 1.
        enable_prefix_caching: whether stored prefixes are found again.
        digest_key: fingerprints of everything stored bytes depend on besides tokens (model,
            formats, scales); prefixes under another key are never found.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        *,
        enable_prefix_caching: bool,
        digest_key: bytes,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._index = PrefixIndex(len(layout.groups))
        self._pool = BlockPool(num_blocks, self._index.forget)
        self._root = root_digest(digest_key)
        self._sequences: dict[Hashable, SequenceState] = {}
        self._stats = CacheStats()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be had now: free ones, and cached ones nobody references."""
        return self._pool.num_available

    @property
    def num_cached_blocks(self) -> int:
        """Blocks nobody references whose contents can still be found."""
        return self._pool.num_cached

    @property
    def stats(self) -> CacheStats:
        """A copy of the running counts."""
        return replace(self._stats, evictions=self._pool.num_evictions)

    def usage(self) -> float:
        """Return the share of blocks that running sequences reference, from 0 to 1."""
        return 1 - self._pool.num_available / self.num_blocks

    def start(self, seq: Hashable, token_ids: Sequence[int], *, reuse_prefix: bool = True) -> int:
        """Begin a sequence and return how many of its tokens are already stored.

        The answer is a number of whole blocks and at most ``len(token_ids) - 1`` tokens, since the
        last token must be computed for its logits.

        Args:
            seq: a name not in use.
            token_ids: the sequence's tokens so far.
            reuse_prefix: false to compute all of it (every position's logits are wanted).
        """
        assert seq not in self._sequences, f"sequence {seq!r} is already running"
        groups = self.layout.groups
        digest = self._root if self.enable_prefix_caching else None
        state = SequenceState(groups, len(token_ids), digest)
        self._sequences[seq] = state
        if digest is None or not reuse_prefix:
            return 0
        hit = find_prefix(self._index, groups, self.layout.block_size, digest, token_ids)
        for own, blocks, first in zip(state.groups, hit.blocks, hit.first_blocks, strict=True):
            own.first_held = first
            for _ in range(first):
                own.append(0)  # never read, but a valid number
            for block in blocks:
                self._pool.reference(block)
                own.append(block)
        state.digest = hit.digest
        state.num_published = state.num_computed = hit.num_tokens
        return hit.num_tokens

    def blocks_needed(self, seq: Hashable | None, num_tokens: int) -> int:
        """Return the most blocks ``seq`` takes, beyond those it has, to reach ``num_tokens``.

        That is over all the steps there, so less than one `reserve` of everything would take where
        windows let go of blocks on the way. `None` stands for a sequence that finds nothing stored.
        """
        if seq is None:
            return peak_blocks(self.layout, num_tokens)
        needed = 0
        for own in self._sequences[seq].groups:
            peak = group_blocks(own.group, num_tokens, self.layout.max_chunk)
            held = len(own.blocks) - own.first_held
            needed += min(own.missing(num_tokens), max(0, peak - held))
        return needed

    def can_hold(self, seq: Hashable | None, num_tokens: int) -> bool:
        """Return whether what is free now would take ``seq`` to ``num_tokens`` tokens."""
        return self.blocks_needed(seq, num_tokens) <= self._pool.num_available

    def fits_alone(self, num_tokens: int) -> bool:
        """Return whether a sequence of ``num_tokens`` tokens can be computed in an empty cache."""
        return peak_blocks(self.layout, num_tokens) <= self.num_blocks

    def reserve(self, seq: Hashable, num_tokens: int) -> bool:
        """Own blocks for all positions before ``num_tokens``; false if there is no room for all.

        Then nothing has changed. Cached blocks nobody references are evicted as needed, those
        unused longest first.
        """
        state = self._sequences[seq]
        missing = [own.missing(num_tokens) for own in state.groups]
        if sum(missing) > self._pool.num_available:
            return False
        for own, count in zip(state.groups, missing, strict=True):
            for _ in range(count):
                own.append(self._pool.take())
        if not state.counted:
            # Only now: a sequence that is started and released again for want of memory, step
            # after step, would count as many hits.
            state.counted = True
            self._stats.queries += 1
            self._stats.query_tokens += state.num_start_tokens
            self._stats.hit_tokens += state.num_computed
        return True

    def commit(self, seq: Hashable, token_ids: Sequence[int], num_computed: int) -> None:
        """Record that the first ``num_computed`` tokens are stored.

        Publishes the blocks that became full, and lets go of blocks that the query at
        ``num_computed`` and later ones cannot see.

        Args:
            seq: the sequence.
            token_ids: its tokens, at least the computed ones.
            num_computed: tokens whose keys and values are stored; within what was reserved.
        """
        state = self._sequences[seq]
        assert state.num_computed <= num_computed
        assert not any(own.missing(num_computed) for own in state.groups), "not reserved"
        state.num_computed = num_computed
        self._publish(state, token_ids)
        for own in state.groups:
            if own.group.window is not None:
                # The query at num_computed sees num_computed - window + 1 and on, later ones less.
                first = own.group.first_visible_block(num_computed)
                for block in own.blocks[own.first_held : first]:
                    self._pool.release(block, keep=self._index.holds(block))
                own.first_held = first

    def _publish(self, state: SequenceState, token_ids: Sequence[int]) -> None:
        """Make every block findable that `commit` found full, before any of them is let go."""
        block_size = self.layout.block_size
        if state.digest is None:
            return
        for start in range(state.num_published, state.num_computed - block_size + 1, block_size):
            end = start + block_size
            state.digest = extend_digest(state.digest, token_ids[start:end])
            state.num_published = end
            for own in state.groups:
                if end % own.group.block_tokens == 0:
                    block = own.blocks[end // own.group.block_tokens - 1]
                    self._index.publish(own.group.index, state.digest, block)

    def release(self, seq: Hashable) -> None:
        """Let go of all of a sequence's blocks; the published ones stay findable.

        Tail first: the head of a prefix serves more requests than its tail, so the tail is to be
        evicted first.
        """
        state = self._sequences.pop(seq)
        by_position = [
            (own.group.block_tokens * (own.first_held + i), block)
            for own in state.groups
            for i, block in enumerate(own.held)
        ]
        for _, block in sorted(by_position, reverse=True):
            self._pool.release(block, keep=self._index.holds(block))

    def block_table(self, seq: Hashable, group: int) -> Sequence[int]:
        """Return the block table of ``seq`` in ``group``; entry i serves positions from ``i * B``.

        At least as long as what is reserved; a view, not to be changed. Entries wholly before the
        window hold any valid number.
        """
        return self._sequences[seq].groups[group].table

    def reset(self, digest_key: bytes) -> None:
        """Forget every stored prefix, because weights, formats or scales changed.

        Sequences that are running keep their blocks but publish nothing any more: what they hold
        was stored the old way.
        """
        self._root = root_digest(digest_key)
        self._index.clear()
        self._pool.drop_cached()
        for state in self._sequences.values():
            state.digest = None

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the bookkeeping contradicts itself; costs O(N).

        Every block is free, cached or referenced; reference counts are those of the tables; no
        block is in tables of two groups; the prefix index names only blocks that hold contents,
        in their own group; tables reach equally far and hold exactly what is still visible.
        """
        groups_of_findable = self._index.check()
        references = [0] * self.num_blocks
        owner = dict(groups_of_findable)
        for state in self._sequences.values():
            state.check()
            for own in state.groups:
                for block in own.held:
                    references[block] += 1
                    if owner.setdefault(block, own.group.index) != own.group.index:
                        raise AssertionError(f"block {block} belongs to two groups")
        self._pool.check(references, groups_of_findable.keys())
