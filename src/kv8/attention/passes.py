"""How the reference backend cuts a ragged batch into passes of bounded size. No tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kv8.geometry import LayerGeometry

# Elements of the keys of one pass widened to float32 (4 MiB); its values take as much again.
MAX_WIDENED: Final = 2**20


@dataclass(frozen=True)
class TokenRange:
    """A run of positions of one sequence, ``start <= position < end``, not empty."""

    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Positions in the range."""
        return self.end - self.start


@dataclass(frozen=True)
class Pass:
    """What is attended at once: one sequence, or several that have one new token each.

    Attributes:
        sequences: their indices in the batch.
        visible: for each, the tokens that any of its new tokens sees.
        num_rows: new tokens of each.
        kv_heads: which kv heads, a range of them.
    """

    sequences: tuple[int, ...]
    visible: tuple[TokenRange, ...]
    num_rows: int
    kv_heads: slice

    @property
    def first_positions(self) -> tuple[int, ...]:
        """Position of each sequence's first new token."""
        return tuple(r.end - self.num_rows for r in self.visible)


@dataclass(frozen=True)
class Tile:
    """Part of a pass whose logits are held at once.

    Attributes:
        rows: which new tokens of each of the pass's sequences.
        keys: which of the tokens in the blocks the pass reads; all that ``rows`` see are there.
    """

    rows: range
    keys: slice


def first_visible(position: int, window: int | None) -> int:
    """Return the first position a query at ``position`` sees."""
    return 0 if window is None else max(0, position - window + 1)


def split_batch(
    geometry: LayerGeometry, query_lens: Sequence[int], context_lens: Sequence[int]
) -> Iterator[Pass]:
    """Yield passes that cover every row and kv head of a batch once, each within `MAX_WIDENED`.

    A single sequence whose one head is larger than that still is one pass.
    """
    visible = [
        TokenRange(first_visible(context - new, geometry.window), context)
        for new, context in zip(query_lens, context_lens, strict=True)
    ]
    num_heads, head_dim = geometry.num_kv_heads, geometry.head_dim
    for group in _group(query_lens, visible, MAX_WIDENED // (num_heads * head_dim)):
        num_tokens = len(group) * visible[group[-1]].num_tokens
        step = max(1, MAX_WIDENED // (num_tokens * head_dim))
        for head in range(0, num_heads, step):
            yield Pass(
                sequences=tuple(group),
                visible=tuple(visible[s] for s in group),
                num_rows=query_lens[group[0]],
                kv_heads=slice(head, min(head + step, num_heads)),
            )


def split_pass(work: Pass, window: int | None, block_size: int, max_rows: int) -> Iterator[Tile]:
    """Yield tiles of at most ``max_rows`` rows that cover the pass's rows."""
    for start in range(0, work.num_rows, max_rows):
        rows = range(start, min(start + max_rows, work.num_rows))
        if len(work.sequences) > 1:  # one row each, and ranges of their own
            yield Tile(rows, slice(None))
            continue
        position, first_read = work.first_positions[0], work.visible[0].start
        first_read -= first_read % block_size
        seen = first_visible(position + rows.start, window), position + rows.stop
        yield Tile(rows, slice(seen[0] - first_read, seen[1] - first_read))


def _group(
    query_lens: Sequence[int], visible: list[TokenRange], max_tokens: int
) -> list[list[int]]:
    """Return groups of sequences, each in order of length, for each is padded to its longest."""
    groups: list[list[int]] = []
    decoding: list[int] = []
    for s in sorted(range(len(visible)), key=lambda s: visible[s].num_tokens):
        if query_lens[s] > 1:
            groups.append([s])
        elif decoding and (len(decoding) + 1) * visible[s].num_tokens <= max_tokens:
            decoding.append(s)
        else:
            decoding = [s]
            groups.append(decoding)
    return groups
