"""Paged storage: writing tokens to slots, and reading ranges of tokens through block tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kv8.attention.passes import TokenRange
from kv8.formats.encode import bits


def write_tokens(pool: torch.Tensor, codes: torch.Tensor, slots: torch.Tensor) -> None:
    """Copy ``codes`` [T, K, D] to ``slots`` (int64 [T]) of ``pool`` [N, K, B, D], bit for bit."""
    block_size = pool.shape[2]
    blocks = slots.div(block_size, rounding_mode="floor")
    bits(pool)[blocks, :, slots - blocks * block_size] = bits(codes)


@dataclass(frozen=True)
class PagedTokens:
    """Where the tokens of C ranges lie: whole blocks, as many for each as the longest touches.

    Attributes:
        blocks: integer [C, m], block numbers.
        positions: int64 [C, n], position in its sequence of each token of these blocks; n = m * B.
        outside: bool [C, n], tokens outside their range; `None` if there are none.
    """

    blocks: torch.Tensor
    positions: torch.Tensor
    outside: torch.Tensor | None

    def read(self, pool: torch.Tensor) -> torch.Tensor:
        """Return codes [C, K, n, D] from ``pool`` [N, K, B, D], whose dimension 0 may be strided.

        A token outside its range was never stored or is out of date, so it reads as zero.
        """
        picked = bits(pool).index_select(0, self.blocks.flatten())  # [C * m, K, B, D]
        picked = picked.view(*self.blocks.shape, *pool.shape[1:]).transpose(1, 2).flatten(2, 3)
        if self.outside is not None:
            picked = picked.masked_fill(self.outside[:, None, :, None], 0)
        return picked.view(pool.dtype)


def locate(tables: torch.Tensor, ranges: Sequence[TokenRange], block_size: int) -> PagedTokens:
    """Return where the tokens of ``ranges`` lie.

    Args:
        tables: block numbers, integer [C, M]. Only columns that a range touches are looked at:
            others may hold numbers of blocks that belong to somebody else by now.
        ranges: one for each of the C sequences.
        block_size: B.
    """
    starts = torch.tensor([[r.start] for r in ranges])
    ends = torch.tensor([[r.end] for r in ranges])
    first, last = starts // block_size, (ends - 1) // block_size
    columns = first + torch.arange(int((last - first).max()) + 1)  # [C, m]
    blocks = tables.gather(1, columns.minimum(last).to(tables.device))
    positions = (columns.unsqueeze(2) * block_size + torch.arange(block_size)).flatten(1)
    outside = (positions < starts) | (positions >= ends)
    device = tables.device
    return PagedTokens(blocks, positions.to(device), outside.to(device) if outside.any() else None)
