"""What the cache manager knows of one running sequence: its blocks by group and by position."""

from collections.abc import Sequence

from kv8.cache.layout import CacheGroup


class GroupBlocks:
    """A sequence's blocks in one group, and the block table that attention sees.

    Attributes:
        group: the group.
        blocks: block i holds positions from ``i * group.block_tokens`` on.
        first_held: the blocks before this one have left the window, or were never needed:
            whatever number stands there, the block is not the sequence's.
        table: entry i is the part that holds positions from ``i * B`` on.
    """

    def __init__(self, group: CacheGroup) -> None:
        self.group = group
        self.blocks: list[int] = []
        self.first_held = 0
        # Where a block is one part, the two lists are the same, and one list serves.
        self.table: list[int] = self.blocks if group.parts == 1 else []

    def append(self, block: int) -> None:
        """Add the block of the positions after those so far."""
        self.blocks.append(block)
        parts = self.group.parts
        if parts > 1:
            self.table.extend(range(block * parts, (block + 1) * parts))

    def missing(self, num_tokens: int) -> int:
        """Return how many blocks to append so that ``num_tokens`` positions have one."""
        return max(0, -(-num_tokens // self.group.block_tokens) - len(self.blocks))

    @property
    def held(self) -> list[int]:
        """The blocks the sequence references."""
        return self.blocks[self.first_held :]


class SequenceState:
    """A running sequence.

    Attributes:
        groups: its blocks in each group.
        num_start_tokens: tokens it was started with.
        num_computed: tokens whose keys and values are stored.
        num_published: tokens in blocks that were offered to the prefix index, a multiple of B.
        digest: digest of these; `None` if the sequence publishes nothing (any more).
        counted: whether statistics include it.
    """

    def __init__(self, groups: Sequence[CacheGroup], num_tokens: int, digest: bytes | None) -> None:
        self.groups = [GroupBlocks(group) for group in groups]
        self.num_start_tokens = num_tokens
        self.num_computed = 0
        self.num_published = 0
        self.digest = digest
        self.counted = False

    def check(self) -> None:
        """Raise `AssertionError` unless every group holds the blocks it should, and no others."""
        reach = max(len(own.blocks) * own.group.block_tokens for own in self.groups)
        rounding = max(own.group.block_tokens for own in self.groups)
        for own in self.groups:
            group = own.group
            if reach - len(own.blocks) * group.block_tokens >= rounding:
                raise AssertionError(f"group {group.index} reaches less far than others")
            if own.missing(self.num_computed):
                raise AssertionError(f"group {group.index} lacks blocks of computed tokens")
            if own.first_held != group.first_visible_block(self.num_computed):
                raise AssertionError(f"group {group.index} holds from block {own.first_held}")
            if len(own.table) != len(own.blocks) * group.parts:
                raise AssertionError(f"group {group.index}: table and blocks do not agree")
