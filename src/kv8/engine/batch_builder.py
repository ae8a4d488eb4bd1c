"""From a schedule to the flat arrays a forward pass takes.

Letters as in docs/architecture.md: T new tokens, S sequences, R rows whose logits are wanted,
B block size, G cache groups.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kv8.cache.manager import CacheManager
from kv8.engine.block_tables import BlockTables
from kv8.engine.request import Request
from kv8.engine.scheduler import ScheduledChunk
from kv8.engine.step_input import StepArrays, StepInput


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


class BatchBuilder:
    """Builds each step's input; remembers the block tables of running requests.

    Args:
        cache: whose block tables are mirrored.
        longest: tokens of the longest sequence.
        device: where the tensors go.
    """

    def __init__(self, cache: CacheManager, longest: int, device: torch.device) -> None:
        self._block_size = cache.layout.block_size
        self._device = device
        self._tables = BlockTables(cache, longest, device)

    def build(self, chunks: Sequence[ScheduledChunk], running: Iterable[Request]) -> StepInput:
        """Return the input of one step.

        Args:
            chunks: the step's work, at least one chunk.
            running: every request that holds blocks; rows of all others are taken back.
        """
        self._tables.retire(running)
        rows = np.array([self._tables.extend(chunk) for chunk in chunks], dtype=np.int64)
        lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        first_rows = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) + np.repeat(starts - first_rows, lengths)
        blocks, offsets = np.divmod(positions, self._block_size)
        slots = self._tables.host[:, np.repeat(rows, lengths), blocks].astype(np.int64)
        decodes = all(chunk.num_tokens == 1 and chunk.reaches_end for chunk in chunks)
        if decodes:  # in most steps; each chunk's only row is wanted
            ids = [chunk.request.token_ids[-1] for chunk in chunks]
            wanted_rows, row_counts = first_rows, (1,) * len(chunks)
        else:
            ids = [i for c in chunks for i in c.request.token_ids[c.start : c.stop]]
            offsets_of_chunks = [logit_rows(chunk) for chunk in chunks]
            row_counts = tuple(map(len, offsets_of_chunks))
            wanted_rows = np.concatenate(
                [first + np.asarray(o, dtype=np.int64)
                 for first, o in zip(first_rows, offsets_of_chunks, strict=True)]
            )  # fmt: skip
        arrays = StepArrays(
            input_ids=np.array(ids, dtype=np.int64),
            positions=positions,
            slots=slots * self._block_size + offsets,
            query_lens=lengths,
            context_lens=starts + lengths,
            table_rows=rows,
            rows=wanted_rows,
        )
        return StepInput(
            arrays,
            self._tables,
            row_counts,
            block_size=self._block_size,
            device=self._device,
            decodes=decodes,
        )
