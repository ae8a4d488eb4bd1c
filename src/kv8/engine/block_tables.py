"""Block tables kept from step to step: one row a running request, extended as it grows.

So the work on the host grows with the new tokens of a step, not with the context they attend to.
On a GPU the tables have a copy there, and only new entries travel.

Letters as in docs/architecture.md: G cache groups, M blocks in the longest block table.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from kv8.cache.manager import CacheManager
from kv8.engine.request import Request
from kv8.engine.scheduler import ScheduledChunk

_FIRST_ROWS = 4  # of the tables, before they grow


@dataclass
class _TableRow:
    """A running request's row: where it is and how far it is filled."""

    index: int
    num_preemptions: int
    num_filled: int = 0


class BlockTables:
    """The tables of all running requests.

    Args:
        cache: whose block tables are mirrored.
        longest: tokens of the longest sequence.
        device: where attention reads the tables.
        mirrored: whether there is a copy on the device, as there is on any but a CPU.

    Attributes:
        host: int32 [G, rows, M]; what is not filled holds any valid number.
    """

    def __init__(
        self,
        cache: CacheManager,
        longest: int,
        device: torch.device,
        *,
        mirrored: bool | None = None,
    ) -> None:
        self._cache = cache
        self._block_size = cache.layout.block_size
        self._device = device
        self._mirrored = device.type != "cpu" if mirrored is None else mirrored
        max_blocks = -(-longest // self._block_size)
        shape = (len(cache.layout.groups), _FIRST_ROWS, max_blocks)
        self.host = np.zeros(shape, dtype=np.int32)
        self._free_rows = list(range(_FIRST_ROWS - 1, -1, -1))
        self._rows: dict[int, _TableRow] = {}
        self._mirror = self._new_mirror()
        self._fresh: list[tuple[int, int, int]] = []  # row, first and last new entry + 1

    def retire(self, running: Iterable[Request]) -> None:
        """Take back the rows of all requests that are not ``running``."""
        for sequence in self._rows.keys() - {request.sequence for request in running}:
            self._free_rows.append(self._rows.pop(sequence).index)

    def extend(self, chunk: ScheduledChunk) -> int:
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
            for group, table in enumerate(self.host):
                blocks = self._cache.block_table(request.sequence, group)
                table[row.index, filled:needed] = blocks[filled:needed]
            row.num_filled = needed
            if self._mirrored:
                self._fresh.append((row.index, filled, needed))
        return row.index

    def take_fresh(self) -> tuple[np.ndarray, np.ndarray]:
        """Return entries the device has not seen: places in its copy, int64, and values, int32."""
        fresh, self._fresh = self._fresh, []
        num_groups, num_rows, width = self.host.shape
        places = [
            (group * num_rows + row) * width + np.arange(start, stop)
            for group in range(num_groups)
            for row, start, stop in fresh
        ]
        at = np.concatenate(places) if places else np.empty(0, dtype=np.int64)
        return at, self.host.reshape(-1)[at]

    def write(self, places: torch.Tensor, values: torch.Tensor) -> None:
        """Write what `take_fresh` returned, now on the device, to the copy there."""
        if len(places):
            self._mirror.view(-1).scatter_(0, places, values)

    def select(self, rows: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
        """Return a table [S, width] for each group, on the device, of ``rows`` (int64 [S])."""
        return tuple(table[:, :width].index_select(0, rows) for table in self._mirror)

    def _free_row(self) -> int:
        """Return a row nobody uses. The tables grow with the most requests that ever ran at once,
        not with the most that might.
        """
        if not self._free_rows:
            num_rows = self.host.shape[1]
            self.host = np.concatenate([self.host, np.zeros_like(self.host)], axis=1)
            self._free_rows = list(range(2 * num_rows - 1, num_rows - 1, -1))
            old, self._mirror = self._mirror, self._new_mirror()
            if self._mirrored:
                self._mirror[:, :num_rows].copy_(old)
        return self._free_rows.pop()

    def _new_mirror(self) -> torch.Tensor:
        if not self._mirrored:
            return torch.from_numpy(self.host)  # the same memory
        return torch.zeros(self.host.shape, dtype=torch.int32, device=self._device)
