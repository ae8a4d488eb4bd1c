"""The input of decode steps at addresses that never change, as a captured graph needs it.

One set of buffers, for the most sequences that decode at once; a step of fewer uses their first
rows. Rows beyond a step's sequences are padding: a token 0 that is stored nowhere (slot -1) and
sees nothing (context 0).

Letters as in docs/architecture.md: S sequences, G cache groups, M blocks in the longest table.
"""

import numpy as np
import torch

from kv8.attention.batch import AttentionBatch
from kv8.engine.step_input import StepInput
from kv8.engine.upload import send, unpack


class StaticBatch:
    """Buffers for up to ``max_seqs`` sequences of one new token each.

    Args:
        max_seqs: most sequences of a step.
        num_groups: G.
        max_blocks: M.
        block_size: tokens a block holds.
        max_context: longest sequence, which is all that the host tells attention of lengths.
        device: where the buffers are.

    Attributes:
        max_seqs: as given.
        input_ids: int64 [max_seqs].
        positions: int64 [max_seqs].
        rows: int64 [max_seqs], 0, 1, 2, ...: each row's logits are wanted.
    """

    def __init__(
        self,
        max_seqs: int,
        *,
        num_groups: int,
        max_blocks: int,
        block_size: int,
        max_context: int,
        device: torch.device,
    ) -> None:
        self.max_seqs, self._num_groups = max_seqs, num_groups
        self._block_size, self._max_context = block_size, max_context
        padding = self._padding()
        self._packed = send(padding, device)
        fields = unpack(self._packed, padding)
        self.input_ids, self.positions, self._context_lens, self._table_rows, self._slots = fields
        self._tables = torch.zeros(
            num_groups, max_seqs, max_blocks, dtype=torch.int32, device=device
        )
        self._query_starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)
        self.rows = torch.arange(max_seqs, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        tensors = (self._packed, self._tables, self._query_starts, self.rows)
        return sum(tensor.nbytes for tensor in tensors)

    def attention(self, num_seqs: int) -> AttentionBatch:
        """Return the buffers' first ``num_seqs`` rows as attention sees them."""
        return AttentionBatch(
            query_starts=self._query_starts[: num_seqs + 1],
            context_lens=self._context_lens[:num_seqs],
            block_tables=tuple(table[:num_seqs] for table in self._tables),
            slots=tuple(slots[:num_seqs] for slots in self._slots),
            block_size=self._block_size,
            query_lens_host=(1,) * num_seqs,
            context_lens_host=(self._max_context,) * num_seqs,
            lengths_on_device=True,
        )

    def write(self, step: StepInput) -> None:
        """Write a step's input over the last one's; the host waits for nothing."""
        arrays, num_seqs = step.arrays, len(step.arrays.query_lens)
        fields = self._padding()
        for field, values in zip(
            fields,
            (arrays.input_ids, arrays.positions, arrays.context_lens, arrays.table_rows),
            strict=False,
        ):
            field[:num_seqs] = values
        fields[-1][:, :num_seqs] = arrays.slots
        places, values = step.tables.take_fresh()
        packed = send((*fields, places, values), self._packed.device)
        self._packed.copy_(packed[: len(self._packed)])
        step.tables.write(*unpack(packed, (*fields, places, values))[len(fields) :])
        width = -(-int(arrays.context_lens.max()) // self._block_size)
        rows = self._table_rows[:num_seqs]
        for target, table in zip(self._tables, step.tables.select(rows, width), strict=True):
            target[:num_seqs, :width].copy_(table)

    def clear(self) -> None:
        """Make every row padding."""
        self._packed.copy_(send(self._padding(), self._packed.device))

    def _padding(self) -> tuple[np.ndarray, ...]:
        """Return ids, positions, context lengths, table rows and slots of rows without sequence."""
        size = self.max_seqs
        return (
            np.zeros(size, dtype=np.int64),
            np.zeros(size, dtype=np.int64),
            np.zeros(size, dtype=np.int32),
            np.zeros(size, dtype=np.int64),
            np.full((self._num_groups, size), -1, dtype=np.int64),
        )
