"""The one object the scheduler asks for cache memory: find, reserve, publish, release. No tensors.

Life of a sequence::

    start    finds the longest stored prefix and takes references to its blocks
    reserve  owns blocks for the tokens of the next step (all of them, or none are taken)
    commit   after the step: publishes full blocks, lets go of blocks no later query can see
    release  drops everything; published blocks stay findable until their memory is needed

A preempted sequence is released and started again: what is left of its blocks is found again.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kv8.cache.blocks import BlockPool
from kv8.cache.capacity import group_blocks, peak_blocks
from kv8.cache.layout import CacheGroup, CacheLayout
from kv8.cache.prefix import PrefixIndex, extend_digest, root_digest


@dataclass
class CacheStats:
    """Running counts, never reset.

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


class _Sequence:
    """What the manager knows of a running sequence.

    For each group g, ``tables[g][i]`` is the block of positions ``i * B`` and on. Entries before
    ``first_held[g]`` have left the window: whatever number stands there, the block is not ours.

        0 ........ first_held ........ num_published ........ len(table)
        let go     held, findable      held, being written

    ``digest`` is that of the published prefix, `None` if the sequence publishes nothing.
    """

    def __init__(self, num_groups: int, num_tokens: int, digest: bytes | None) -> None:
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.first_held = [0] * num_groups
        self.num_published = 0
        self.num_computed = 0
        self.num_prompt_tokens = num_tokens
        self.digest = digest
        self.counted = False


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
        self._sequences: dict[Hashable, _Sequence] = {}
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
        counts = self._stats
        return CacheStats(
            counts.queries, counts.query_tokens, counts.hit_tokens, self._pool.num_evictions
        )

    def usage(self) -> float:
        """Return the share of blocks that running sequences reference, from 0 to 1."""
        return 1 - self._pool.num_available / self.num_blocks

    def start(self, seq: Hashable, token_ids: Sequence[int], *, reuse_prefix: bool = True) -> int:
        """Begin a sequence and return how many of its tokens are already stored.

        The answer is a number of whole blocks and at most ``len(token_ids) - 1`` tokens, since the
        last token must be computed for its logits. Groups without a window must have every block
        of the prefix, window groups those that later queries can see.

        Args:
            seq: a name not in use.
            token_ids: the sequence's tokens so far.
            reuse_prefix: false to compute all of it (every position's logits are wanted).
        """
        assert seq not in self._sequences, f"sequence {seq!r} is already running"
        digest = self._root if self.enable_prefix_caching else None
        state = _Sequence(len(self.layout.groups), len(token_ids), digest)
        self._sequences[seq] = state
        if digest is None or not reuse_prefix:
            return 0
        num_blocks, state.digest, found = self._find(digest, token_ids)
        for group, table, blocks in zip(self.layout.groups, state.tables, found, strict=True):
            first = self._first_visible_block(group, num_blocks * self.layout.block_size)
            state.first_held[group.index] = first
            # Entries no query looks at hold a valid number all the same: 0.
            table.extend([0] * first)
            for block in blocks[first:num_blocks]:
                assert block is not None
                self._pool.reference(block)
                table.append(block)
        state.num_published = num_blocks
        state.num_computed = num_blocks * self.layout.block_size
        return state.num_computed

    def _find(
        self, digest: bytes, token_ids: Sequence[int]
    ) -> tuple[int, bytes, list[list[int | None]]]:
        """Return the usable blocks of a stored prefix, its digest, and what each group has."""
        block_size = self.layout.block_size
        groups = self.layout.groups
        found: list[list[int | None]] = [[] for _ in groups]
        run = [0] * len(groups)  # stored blocks without a gap that end at the current one
        best, best_digest = 0, digest
        for end in range(block_size, len(token_ids), block_size):
            digest = extend_digest(digest, token_ids[end - block_size : end])
            for group in groups:
                block = self._index.find(group.index, digest)
                found[group.index].append(block)
                run[group.index] = 0 if block is None else run[group.index] + 1
            num_blocks = end // block_size
            if all(
                run[group.index] >= num_blocks - self._first_visible_block(group, end)
                for group in groups
            ):
                best, best_digest = num_blocks, digest
            if any(group.window is None and run[group.index] < num_blocks for group in groups):
                break
        return best, best_digest, found

    def _first_visible_block(self, group: CacheGroup, position: int) -> int:
        return group.first_visible_block(position, self.layout.block_size)

    def blocks_needed(self, seq: Hashable | None, num_tokens: int) -> int:
        """Return the most blocks ``seq`` takes, beyond those it has, to reach ``num_tokens``.

        That is over all the steps there, so less than one `reserve` of everything would take where
        windows let go of blocks on the way. `None` stands for a sequence that finds nothing stored.
        """
        if seq is None:
            return peak_blocks(self.layout, num_tokens)
        state = self._sequences[seq]
        whole = -(-num_tokens // self.layout.block_size)
        needed = 0
        for group, table in zip(self.layout.groups, state.tables, strict=True):
            first = state.first_held[group.index]
            peak = group_blocks(self.layout, group, num_tokens, self.layout.max_chunk)
            needed += max(0, min(peak, whole - first) - (len(table) - first))
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
        missing = -(-num_tokens // self.layout.block_size) - len(state.tables[0])
        if missing * len(state.tables) > self._pool.num_available:
            return False
        for table in state.tables:
            for _ in range(missing):
                table.append(self._pool.take())
        if not state.counted:
            # Only now: a sequence that is started and released again for want of memory, step
            # after step, would count as many hits.
            state.counted = True
            self._stats.queries += 1
            self._stats.query_tokens += state.num_prompt_tokens
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
        block_size = self.layout.block_size
        assert state.num_computed <= num_computed <= block_size * len(state.tables[0])
        state.num_computed = num_computed
        if state.digest is not None:
            for index in range(state.num_published, num_computed // block_size):
                start = index * block_size
                state.digest = extend_digest(state.digest, token_ids[start : start + block_size])
                for number, table in enumerate(state.tables):
                    self._index.publish(number, state.digest, table[index])
                state.num_published += 1
        for group in self.layout.groups:
            if group.window is not None:
                first = self._first_visible_block(group, num_computed)
                held = state.first_held[group.index]
                for block in state.tables[group.index][held:first]:
                    self._pool.release(block, keep=self._index.holds(block))
                state.first_held[group.index] = max(held, first)

    def release(self, seq: Hashable) -> None:
        """Let go of all of a sequence's blocks; the published ones stay findable.

        Tail first: the head of a prefix serves more requests than its tail, so the tail is the
        first to be evicted.
        """
        state = self._sequences.pop(seq)
        for index in range(len(state.tables[0]) - 1, -1, -1):
            for first, table in zip(state.first_held, state.tables, strict=True):
                if index >= first:
                    self._pool.release(table[index], keep=self._index.holds(table[index]))

    def block_table(self, seq: Hashable, group: int) -> Sequence[int]:
        """Return the blocks of ``seq`` in ``group``, by position; a view, not to be changed.

        Entries wholly before the window hold any valid number.
        """
        return self._sequences[seq].tables[group]

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
        in their own group; tables reach equally far.
        """
        references = [0] * self.num_blocks
        owner = self._index.check()
        for name, state in self._sequences.items():
            if len({len(table) for table in state.tables}) != 1:
                raise AssertionError(f"{name!r}: block tables of unequal length")
            if state.num_computed > len(state.tables[0]) * self.layout.block_size:
                raise AssertionError(f"{name!r}: more tokens computed than reserved")
            for group in self.layout.groups:
                first = state.first_held[group.index]
                if first != self._first_visible_block(group, state.num_computed):
                    raise AssertionError(f"{name!r}: group {group.index} holds from block {first}")
                for block in state.tables[group.index][first:]:
                    references[block] += 1
                    if owner.setdefault(block, group.index) != group.index:
                        raise AssertionError(f"block {block} is owned by two groups")
        self._pool.check(references, findable=self._index.check().keys())
