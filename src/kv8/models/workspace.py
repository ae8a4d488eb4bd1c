"""Memory in which the layers of one model compute, one after another."""

from collections.abc import Sequence
from typing import Final

import torch

from kv8.kernels.step import MOST_ROWS, MOST_SCRATCH_ROWS, scratch_size
from kv8.models.layer_operations import angles

_ROOM: Final = 2048  # rows there is room for if there are more than few


class Workspace:
    """Memory the layers of one model share; what is in it does not outlast a layer.

    Pages that were used before are at hand: those of a fresh tensor the system has to clear first,
    which takes as long as some of the operations that fill it.

    Args:
        dtype: of the model.

    Attributes:
        capacity: rows it has room for. While that is the same, so is the memory that `rows` gives.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.capacity = MOST_ROWS
        self._tensors: dict[tuple[str, int], torch.Tensor] = {}
        self._scratch: dict[int, torch.Tensor] = {}  # by number of inputs
        self._angles: tuple[Sequence[torch.Tensor] | None, list[torch.Tensor]] = (None, [])

    def reserve(self, num_rows: int) -> None:
        """Have room for so many rows: if that is more than before, `rows` gives other memory."""
        if num_rows > self.capacity:
            self.capacity = max(_ROOM, 1 << (num_rows - 1).bit_length())
            self._tensors.clear()

    def rows(self, name: str, width: int) -> torch.Tensor:
        """Return a tensor [capacity, width], the same for the same name and width."""
        key = (name, width)
        if key not in self._tensors:
            self._tensors[key] = torch.empty(self.capacity, width, dtype=self._dtype)
        return self._tensors[key]

    def many_rows(self, name: str, num_rows: int, width: int) -> torch.Tensor:
        """Return a tensor [num_rows, width], in the memory of an earlier one if that suffices."""
        key = (f"many: {name}", width)
        if key not in self._tensors or len(self._tensors[key]) < num_rows:
            self._tensors[key] = torch.empty(num_rows, width, dtype=self._dtype)
        return self._tensors[key][:num_rows]

    def scratch(self, num_inputs: int, num_rows: int) -> torch.Tensor:
        """Return what a product of so many rows ``num_inputs`` wide needs besides, float32."""
        size = scratch_size(min(num_rows, MOST_SCRATCH_ROWS), num_inputs)
        scratch = self._scratch.get(num_inputs)
        if scratch is None or len(scratch) < size:
            scratch = self._scratch[num_inputs] = torch.zeros(size, dtype=torch.float32)
        return scratch

    def angles(self, cos_sin: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return cosines and sines as [T, rotary]; most layers of a step get the same."""
        if self._angles[0] is not cos_sin:
            self._angles = (cos_sin, [angles(table) for table in cos_sin])
        return self._angles[1]
