"""From a schedule to the flat tensors a forward pass takes.

Letters as in docs/architecture.md: T new tokens, S sequences, R rows whose logits are wanted,
B block size, G cache groups, M blocks in the longest block table.

Block tables are kept from step to step, one row a running request, and only extended; so the
work on the host grows with the new tokens of a step, not with the context they attend to.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kv8.attention.batch import AttentionBatch
from kv8.cache.manager import CacheManager
from kv8.engine.request import Request
from kv8.engine.scheduler import ScheduledChunk

_FIRST_ROWS = 4  # of the tables, before they grow


@dataclass(frozen=True)
class StepInput:
    """One forward pass.

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T], position of each token in its sequence.
        attention: the batch as attention sees it.
        rows: int64 [R], rows of the T tokens whose logits are wanted, in order.
        row_counts: how many of the R rows belong to each chunk of the schedule.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    rows: torch.Tensor
    row_counts: tuple[int, ...]


def logit_rows(chunk: ScheduledChunk) -> range:
    """Return the tokens of ``chunk``, counted from its start, whose logits are wanted.

    The last known token's, to sample the next one; and every prompt token's but the last that has
    not been delivered yet, when prompt log probabilities were asked for.
    """
    request = chunk.request
    first = chunk.num_tokens - int(chunk.reaches_end)
    if request.wants_prompt_logits:
        undelivered = max(request.num_prompt_logits, chunk.start)
        if undelivered < min(chunk.stop, request.num_prompt_tokens - 1):
            first = undelivered - chunk.start
    return range(first, chunk.num_tokens)


@dataclass
class _TableRow:
    """A running request's row in the kept tables: where it is and how far it is filled."""

    index: int
    num_preemptions: int
    num_filled: int = 0


class BatchBuilder:
    """Builds each step's tensors; remembers the block tables of running requests.

    Args:
        cache: whose block tables are mirrored.
        num_groups: G.
        block_size: B.
        max_blocks: most blocks a sequence has in one group.
        device: where the tensors go.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        num_groups: int,
        block_size: int,
        max_blocks: int,
        device: torch.device,
    ) -> None:
        self._cache = cache
        self._block_size = block_size
        self._device = device
        self._tables = np.zeros((num_groups, _FIRST_ROWS, max_blocks), dtype=np.int32)
        self._free_rows = list(range(_FIRST_ROWS - 1, -1, -1))
        self._rows: dict[int, _TableRow] = {}

    def build(self, chunks: Sequence[ScheduledChunk], running: Iterable[Request]) -> StepInput:
        """Return the tensors of one step.

        Args:
            chunks: the step's work, at least one chunk.
            running: every request that holds blocks; rows of all others are taken back.
        """
        for sequence in self._rows.keys() - {request.sequence for request in running}:
            self._free_rows.append(self._rows.pop(sequence).index)
        rows = np.array([self._extended_row(chunk) for chunk in chunks])
        lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        contexts = starts + lengths
        query_starts = np.concatenate(([0], np.cumsum(lengths)))
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lengths)
        blocks, offsets = np.divmod(positions, self._block_size)
        width = -(-int(contexts.max()) // self._block_size)
        ids: list[int] = []
        wanted: list[range] = []
        for chunk, first in zip(chunks, query_starts, strict=False):
            ids += chunk.request.token_ids[chunk.start : chunk.stop]
            rows_of_chunk = logit_rows(chunk)
            wanted.append(range(first + rows_of_chunk.start, first + rows_of_chunk.stop))
        row_of_token = np.repeat(rows, lengths)
        attention = AttentionBatch(
            query_starts=self._tensor(query_starts.astype(np.int32)),
            context_lens=self._tensor(contexts.astype(np.int32)),
            block_tables=tuple(self._tensor(table[rows, :width]) for table in self._tables),
            slots=tuple(
                self._tensor(
                    table[row_of_token, blocks].astype(np.int64) * self._block_size + offsets
                )
                for table in self._tables
            ),
            block_size=self._block_size,
            query_lens_host=tuple(lengths.tolist()),
            context_lens_host=tuple(contexts.tolist()),
        )
        return StepInput(
            input_ids=torch.tensor(ids, dtype=torch.int64, device=self._device),
            positions=self._tensor(positions),
            attention=attention,
            rows=self._tensor(np.concatenate([np.asarray(r, dtype=np.int64) for r in wanted])),
            row_counts=tuple(len(r) for r in wanted),
        )

    def _extended_row(self, chunk: ScheduledChunk) -> int:
        """Copy the blocks a request gained since its last step; return its row's index.

        Earlier entries never change while it runs: blocks that fell out of a window go stale in
        the row, which is allowed, since attention never reads them. A preempted request has given
        up every block, so its row is filled anew.
        """
        request = chunk.request
        row = self._rows.get(request.sequence)
        if row is None:
            row = _TableRow(self._free_row(), request.num_preemptions)
            self._rows[request.sequence] = row
        if row.num_preemptions != request.num_preemptions:
            row.num_preemptions, row.num_filled = request.num_preemptions, 0
        filled, needed = row.num_filled, -(-chunk.stop // self._block_size)
        if needed > filled:
            for group, table in enumerate(self._tables):
                blocks = self._cache.block_table(request.sequence, group)
                table[row.index, filled:needed] = blocks[filled:needed]
            row.num_filled = needed
        return row.index

    def _free_row(self) -> int:
        """Return a row nobody uses. The tables grow with the most requests that ever ran at once,
        not with the most that might.
        """
        if not self._free_rows:
            num_rows = self._tables.shape[1]
            self._tables = np.concatenate([self._tables, np.zeros_like(self._tables)], axis=1)
            self._free_rows = list(range(2 * num_rows - 1, num_rows - 1, -1))
        return self._free_rows.pop()

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
