"""How much fits: the only place that turns bytes, blocks, tokens and requests into each other.

The planner, the allocator, admission, the log and every refusal call these functions, so a printed
number is the one that is allocated, and a suggested length is one that starts.

How many blocks a sequence holds, by group:

- a group that sees everything: ``ceil(tokens / T)``, T being the tokens of one of its blocks;
- a window group: the blocks under its window and under the tokens of one step. m consecutive
  positions touch at most ``(m + T - 2) // T + 1`` blocks; a step that computes c tokens needs
  ``m = window - 1 + c`` positions. c is 1 while decoding and at most ``max_chunk`` while the
  prompt is computed, so prefill needs more for a moment: that peak is part of every answer here.
"""

from dataclasses import dataclass

from kv8.cache.layout import CacheGroup, CacheLayout
from kv8.units import format_bytes


def group_blocks(group: CacheGroup, num_tokens: int, chunk: int) -> int:
    """Return the most blocks of ``group`` a sequence holds on its way to ``num_tokens`` tokens.

    ``chunk`` is the most tokens of it that one step computes.
    """
    whole = -(-num_tokens // group.block_tokens)
    if group.window is None:
        return whole
    positions = group.window - 1 + min(chunk, num_tokens)
    return min(whole, (positions + group.block_tokens - 2) // group.block_tokens + 1)


def decode_blocks(layout: CacheLayout, num_tokens: int) -> int:
    """Return the most blocks a sequence of ``num_tokens`` tokens holds while it decodes."""
    return sum(group_blocks(group, num_tokens, 1) for group in layout.groups)


def peak_blocks(layout: CacheLayout, num_tokens: int) -> int:
    """Return the most blocks a sequence holds on its way to ``num_tokens``, prefill included."""
    return sum(group_blocks(group, num_tokens, layout.max_chunk) for group in layout.groups)


def longest_sequence(layout: CacheLayout, num_blocks: int) -> int | None:
    """Return the longest single sequence, in tokens, that ``num_blocks`` blocks can hold.

    `None` when there is no limit: every layer has a window, and all the windows fit.
    """
    largest_block = max(group.block_tokens for group in layout.groups)
    windows = [group.window for group in layout.groups if group.window is not None]
    if len(windows) == len(layout.groups):
        # From here on a sequence grows without holding more.
        high = max(windows) + layout.max_chunk + 2 * largest_block
        if peak_blocks(layout, high) <= num_blocks:
            return None
    else:
        high = num_blocks * largest_block + 1
    low = 0
    while high - low > 1:  # low fits, high does not
        middle = (low + high) // 2
        if peak_blocks(layout, middle) <= num_blocks:
            low = middle
        else:
            high = middle
    return low


def memory_for(layout: CacheLayout, num_tokens: int) -> int:
    """Return the bytes of arena that one sequence of ``num_tokens`` tokens needs."""
    return peak_blocks(layout, num_tokens) * layout.block_bytes


@dataclass(frozen=True)
class Capacity:
    """What a cache of some memory holds.

    Attributes:
        memory_bytes: the memory it was given.
        block_size: B, tokens that an entry of a block table stands for.
        block_bytes: bytes of a block.
        num_blocks: N; all of them can be used, none is reserved.
        bytes_per_token: bytes of codes a token takes in all layers, padding not counted.
        padding_bytes: unused bytes in one block of each group.
        scale_bytes: bytes of scales and counters, which stand outside the arena.
        max_model_len: longest sequence the other figures assume.
        tokens: tokens of context held when requests of ``max_model_len`` tokens (rounded up to
            whole blocks) fill the cache, the last one as long as fits. Without windows this is
            ``num_blocks * block_size`` whatever the lengths; with windows the window layers hold
            only a part of these tokens, and shorter requests fit fewer.
        max_concurrency: requests of ``max_model_len`` tokens that fit at once, the last one as a
            fraction; below 1 exactly if ``max_model_len`` does not fit.
        longest_sequence: longest single sequence that fits, `None` for no limit.
    """

    memory_bytes: int
    block_size: int
    block_bytes: int
    num_blocks: int
    bytes_per_token: int
    padding_bytes: int
    scale_bytes: int
    max_model_len: int
    tokens: int
    max_concurrency: float
    longest_sequence: int | None

    @property
    def cache_bytes(self) -> int:
        """Bytes of the arena: whole blocks, so less than a block below ``memory_bytes``."""
        return self.num_blocks * self.block_bytes

    @property
    def fits(self) -> bool:
        """Whether a sequence of ``max_model_len`` tokens fits."""
        return self.longest_sequence is None or self.longest_sequence >= self.max_model_len

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens in {self.num_blocks:,} blocks of {self.block_size} "
            f"({format_bytes(self.cache_bytes)} of {format_bytes(self.memory_bytes)}, "
            f"{self.bytes_per_token:,} bytes a token): {self.max_concurrency:.2f} requests of "
            f"{self.max_model_len:,} tokens at once"
        )


def capacity(layout: CacheLayout, memory_bytes: int, max_model_len: int) -> Capacity:
    """Return what ``memory_bytes`` hold of a cache laid out as ``layout``.

    Args:
        layout: the layout.
        memory_bytes: memory for the arena; what is less than a block stays unused.
        max_model_len: longest sequence a request may have, in tokens.
    """
    num_blocks = memory_bytes // layout.block_bytes
    longest = longest_sequence(layout, num_blocks)
    whole_len = -(-max_model_len // layout.block_size) * layout.block_size
    each = decode_blocks(layout, whole_len)
    # Chunks of all requests of a step together are at most max_chunk tokens, so the blocks that
    # prefill takes beyond decoding are needed once, not for every request.
    spare = peak_blocks(layout, whole_len) - each
    full_requests = max(0, num_blocks - spare) // each
    last = longest_sequence(layout, num_blocks - full_requests * each)
    return Capacity(
        memory_bytes=memory_bytes,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        num_blocks=num_blocks,
        bytes_per_token=layout.bytes_per_token,
        padding_bytes=layout.padding_bytes,
        scale_bytes=layout.scale_bytes,
        max_model_len=max_model_len,
        tokens=full_requests * whole_len + min(whole_len, whole_len if last is None else last),
        max_concurrency=max(0, num_blocks - spare) / each,
        longest_sequence=longest,
    )
