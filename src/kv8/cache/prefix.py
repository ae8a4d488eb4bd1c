"""Finding stored blocks by the tokens before them: chained digests, one index a cache group.

A block's keys and values depend on every token up to its end, on the weights, and on how they were
stored. Its digest is therefore chained: the first link is the engine's key (model, format and scale
fingerprints), each further one hashes the digest before it and the block's own tokens. With 256-bit
digests two different prefixes never meet in practice, by accident or on purpose.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kv8.cache.layout import CacheGroup

_DIGEST_BYTES = 32


def root_digest(key: bytes) -> bytes:
    """Return the digest of the empty prefix under an engine's key."""
    return hashlib.blake2b(key, digest_size=_DIGEST_BYTES).digest()


def extend_digest(digest: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of a prefix continued by the tokens of one more block."""
    return hashlib.blake2b(
        digest + array("q", token_ids).tobytes(), digest_size=_DIGEST_BYTES
    ).digest()


class PrefixIndex:
    """Which block of each group holds which prefix: at most one block for a group and digest."""

    def __init__(self, num_groups: int) -> None:
        self._blocks: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._keys: dict[int, tuple[int, bytes]] = {}

    def find(self, group: int, digest: bytes) -> int | None:
        """Return the block of ``group`` that holds the end of the prefix, or `None`."""
        return self._blocks[group].get(digest)

    def publish(self, group: int, digest: bytes, block: int) -> None:
        """Make ``block`` findable, unless another block already holds the same prefix.

        Two equal prompts computed side by side each own their blocks; the first stays.
        """
        if self._blocks[group].setdefault(digest, block) == block:
            self._keys[block] = (group, digest)

    def holds(self, block: int) -> bool:
        """Return whether ``block`` can be found."""
        return block in self._keys

    def forget(self, block: int) -> None:
        """Make ``block`` unfindable."""
        group, digest = self._keys.pop(block)
        del self._blocks[group][digest]

    def clear(self) -> None:
        """Forget everything."""
        for blocks in self._blocks:
            blocks.clear()
        self._keys.clear()

    def check(self) -> dict[int, int]:
        """Return the group of every findable block; `AssertionError` if the two maps disagree."""
        forward = {b: (g, d) for g, blocks in enumerate(self._blocks) for d, b in blocks.items()}
        if forward != self._keys or len(forward) != sum(map(len, self._blocks)):
            raise AssertionError("the prefix index and its reverse do not agree")
        return {block: group for block, (group, _) in forward.items()}


@dataclass(frozen=True)
class PrefixHit:
    """The longest stored prefix that a sequence can start from.

    Attributes:
        num_tokens: its length: whole blocks of every group.
        digest: its digest.
        blocks: for each group, its blocks from ``first_blocks`` on; those before are not needed.
        first_blocks: for each group, the first block that later queries can see.
    """

    num_tokens: int
    digest: bytes
    blocks: tuple[tuple[int, ...], ...]
    first_blocks: tuple[int, ...]


def find_prefix(
    index: PrefixIndex,
    groups: Sequence[CacheGroup],
    block_size: int,
    root: bytes,
    token_ids: Sequence[int],
) -> PrefixHit:
    """Return the longest prefix of ``token_ids``, not all of it, that every group can provide.

    A group without a window must have every block of it, a window group those that the query
    after the prefix, and later ones, can see.
    """
    digest = root
    found: list[list[int | None]] = [[] for _ in groups]
    run = [0] * len(groups)  # blocks without a gap that end with the last one looked up
    best, best_digest = 0, root
    for end in range(block_size, len(token_ids), block_size):
        digest = extend_digest(digest, token_ids[end - block_size : end])
        usable = True
        for g, group in enumerate(groups):
            if end % group.block_tokens:
                usable = False
                continue
            block = index.find(g, digest)
            found[g].append(block)
            run[g] = 0 if block is None else run[g] + 1
            visible = end // group.block_tokens - group.first_visible_block(end)
            usable = usable and run[g] >= visible
        if usable:
            best, best_digest = end, digest
        if any(
            group.window is None and blocks and blocks[-1] is None
            for group, blocks in zip(groups, found, strict=True)
        ):
            break
    firsts = tuple(group.first_visible_block(best) for group in groups)
    kept = (
        blocks[first : best // group.block_tokens]
        for group, blocks, first in zip(groups, found, firsts, strict=True)
    )
    return PrefixHit(
        best, best_digest, tuple(tuple(b for b in k if b is not None) for k in kept), firsts
    )
