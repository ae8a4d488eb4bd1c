"""One engine step's ragged batch, as attention sees it.

Letters as in docs/architecture.md: T new tokens in the step, S sequences, B block size, G cache
groups, M blocks in the longest block table.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """S sequences, each with one or more new tokens whose keys and values this step stores.

    New token i of sequence s (row ``query_starts[s] + i``) stands at position
    ``context_lens[s] - query_len(s) + i`` of its sequence. Position p of a sequence lies in block
    ``block_tables[g][s, p // block_size]`` at offset ``p % block_size``. Table entries past the
    end, or wholly before a layer's window, hold any valid number and are never read.

    Attributes:
        query_starts: int32 [S + 1], first row of each sequence, then T.
        context_lens: int32 [S], tokens of each sequence in the cache after this step's store.
        block_tables: for each cache group, int32 [S, M].
        slots: for each cache group, int64 [T], ``block * block_size + offset`` of each new token.
        block_size: B.
        query_lens_host: new tokens of each sequence, on the host (S numbers, each at least 1).
        context_lens_host: ``context_lens`` on the host.
        lengths_on_device: whether only the device knows how long the sequences are, as in a step
            recorded once and played back. Then every sequence has one new token,
            ``context_lens_host`` holds upper bounds, and rows may be padding: context 0 and slot
            -1, whose keys and values go nowhere and whose attention is 0.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slots: tuple[torch.Tensor, ...]
    block_size: int
    query_lens_host: tuple[int, ...]
    context_lens_host: tuple[int, ...]
    lengths_on_device: bool = False

    @property
    def num_tokens(self) -> int:
        """T, new tokens in the step."""
        return sum(self.query_lens_host)

    @property
    def num_sequences(self) -> int:
        """S, sequences in the step."""
        return len(self.query_lens_host)
