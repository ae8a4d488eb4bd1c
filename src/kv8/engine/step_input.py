"""One forward pass: first as arrays on the host, then as tensors where the model is.

Letters as in docs/architecture.md: T new tokens, S sequences, R rows whose logits are wanted,
G cache groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from kv8.attention.batch import AttentionBatch
from kv8.engine.block_tables import BlockTables
from kv8.engine.upload import upload


@dataclass(frozen=True)
class StepArrays:
    """What a step computes, on the host.

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T], position of each token in its sequence.
        slots: int64 [G, T], where each token's keys and values go.
        query_lens: int64 [S], new tokens of each sequence.
        context_lens: int64 [S], tokens of each sequence after the step.
        table_rows: int64 [S], each sequence's row of the block tables.
        rows: int64 [R], rows of the T tokens whose logits are wanted, in order.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_lens: np.ndarray
    context_lens: np.ndarray
    table_rows: np.ndarray
    rows: np.ndarray


class StepInput:
    """One forward pass. Its tensors are made when first asked for, before the next is built.

    Args:
        arrays: the step on the host.
        tables: block tables of the running requests.
        row_counts: how many of the R rows belong to each chunk of the schedule.
        block_size: tokens a block holds.
        device: where the tensors go.
        decodes: whether every sequence has one new token, its last, and wants its logits.
    """

    def __init__(
        self,
        arrays: StepArrays,
        tables: BlockTables,
        row_counts: tuple[int, ...],
        *,
        block_size: int,
        device: torch.device,
        decodes: bool = False,
    ) -> None:
        self.arrays, self.tables = arrays, tables
        self.row_counts, self.decodes = row_counts, decodes
        self._block_size, self._device = block_size, device

    def with_rows(self, rows: Sequence[int]) -> "StepInput":
        """Return the same step, of which the logits of other rows are wanted."""
        return StepInput(
            replace(self.arrays, rows=np.array(rows, dtype=np.int64)),
            self.tables,
            (len(rows),),
            block_size=self._block_size,
            device=self._device,
        )

    @property
    def input_ids(self) -> torch.Tensor:
        """Token numbers, int64 [T]."""
        return self._placed[0]

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token in its sequence, int64 [T]."""
        return self._placed[1]

    @property
    def rows(self) -> torch.Tensor:
        """Rows of the T tokens whose logits are wanted, int64 [R], in order."""
        return self._placed[2]

    @property
    def attention(self) -> AttentionBatch:
        """The batch as attention sees it."""
        return self._placed[3]

    @cached_property
    def _placed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
        step, size = self.arrays, self._block_size
        starts = np.concatenate(([0], np.cumsum(step.query_lens))).astype(np.int32)
        host = (step.input_ids, step.positions, step.rows, starts,
                step.context_lens.astype(np.int32), step.slots, step.table_rows,
                *self.tables.take_fresh())  # fmt: skip
        ids, positions, rows, query_starts, contexts, slots, table_rows, *fresh = upload(
            host, self._device
        )
        self.tables.write(*fresh)
        batch = AttentionBatch(
            query_starts=query_starts,
            context_lens=contexts,
            block_tables=self.tables.select(table_rows, -(-int(step.context_lens.max()) // size)),
            slots=tuple(slots),
            block_size=size,
            query_lens_host=tuple(step.query_lens.tolist()),
            context_lens_host=tuple(step.context_lens.tolist()),
        )
        return ids, positions, rows, batch
