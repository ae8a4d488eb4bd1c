"""Who uses each block: referenced by sequences, kept for reuse, or free. Numbers, no bytes."""

from collections import OrderedDict
from collections.abc import Callable, Sequence, Set


class BlockPool:
    """N blocks, each at any time in exactly one of three states.

    *Referenced*: in the block tables of one or more sequences. *Cached*: in nobody's, but its
    contents can still be found by prefix; taken back in order of last use when memory is needed.
    *Free*: holds nothing anyone could want.

    Args:
        num_blocks: N.
        forget: called with a cached block before it is taken for other contents.
    """

    def __init__(self, num_blocks: int, forget: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._forget = forget
        self._references = [0] * num_blocks
        # A stack: the block freed last is the one most likely still in the processor's caches.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `take` could hand out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks nobody references whose contents can still be found."""
        return len(self._cached)

    def take(self) -> int:
        """Return a block with one reference, evicting the cached one unused longest if need be.

        The caller has made sure that `num_available` is not 0.
        """
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self.num_evictions += 1
        self._references[block] = 1
        return block

    def reference(self, block: int) -> None:
        """Add a reference to a block that holds contents."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """Drop a reference; the last one leaves the block cached if ``keep``, else free."""
        self._references[block] -= 1
        if self._references[block] == 0:
            if keep:
                self._cached[block] = None
            else:
                self._free.append(block)

    def drop_cached(self) -> None:
        """Turn every cached block into a free one."""
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self, references: Sequence[int], findable: Set[int]) -> None:
        """Raise `AssertionError` unless every block is in the one state it should be in.

        Args:
            references: for each block, how many block tables hold it.
            findable: blocks whose contents the prefix index names.
        """
        if list(references) != self._references:
            wrong = [b for b, n in enumerate(references) if n != self._references[b]]
            raise AssertionError(f"reference counts differ from the block tables: blocks {wrong}")
        unreferenced = {b for b, n in enumerate(references) if n == 0}
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block stands in the free list twice")
        if self._cached.keys() != unreferenced & findable:
            raise AssertionError("cached blocks are not the unreferenced ones that can be found")
        if free != unreferenced - findable:
            raise AssertionError("free blocks are not the unreferenced ones that hold nothing")
