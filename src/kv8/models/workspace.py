"""Memory in which the layers of one model compute, one after another."""

from collections.abc import Sequence

import torch

from kv8.kernels.step import MOST_ROWS, scratch_size
from kv8.models.layer_operations import angles


class Workspace:
    """Memory the layers of one model share; what is in it does not outlast a layer.

    Pages that were used before are at hand: those of a fresh tensor the system has to clear first,
    which takes as long as some of the operations that fill it.

    Args:
        dtype: of the model.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tensors: dict[tuple[str, int], torch.Tensor] = {}
        self._angles: tuple[Sequence[torch.Tensor] | None, list[torch.Tensor]] = (None, [])

    def rows(self, name: str, width: int) -> torch.Tensor:
        """Return a tensor [MOST_ROWS, width], the same for the same name and width."""
        key = (name, width)
        if key not in self._tensors:
            self._tensors[key] = torch.zeros(MOST_ROWS, width, dtype=self._dtype)
        return self._tensors[key]

    def many_rows(self, name: str, num_rows: int, width: int) -> torch.Tensor:
        """Return a tensor [num_rows, width], in the memory of an earlier one if that suffices."""
        key = (f"many: {name}", width)
        if key not in self._tensors or len(self._tensors[key]) < num_rows:
            self._tensors[key] = torch.empty(num_rows, width, dtype=self._dtype)
        return self._tensors[key][:num_rows]

    def scratch(self, num_inputs: int, num_rows: int = MOST_ROWS) -> torch.Tensor:
        """Return what a product of rows ``num_inputs`` wide needs besides, float32."""
        key = (f"scratch of {num_rows}", num_inputs)
        if key not in self._tensors:
            size = scratch_size(num_rows, num_inputs)
            self._tensors[key] = torch.zeros(size, dtype=torch.float32)
        return self._tensors[key]

    def angles(self, cos_sin: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return cosines and sines as [T, rotary]; most layers of a step get the same."""
        if self._angles[0] is not cos_sin:
            self._angles = (cos_sin, [angles(table) for table in cos_sin])
        return self._angles[1]
