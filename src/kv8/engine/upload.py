"""From host arrays to tensors on a device, without making the host wait for the device.

A copy from ordinary memory makes the host wait until the device has done all its work. From pinned
memory it does not; so everything goes through pinned memory, many arrays in one copy. torch keeps
such memory from being used again before its copy is done.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

_ALIGNMENT = 16  # bytes; enough for any element


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Return ``arrays`` as tensors on ``device``; on a CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    return unpack(send(arrays, device), arrays)


def to_device(
    values: Sequence[float] | Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return numbers as a tensor on ``device``."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def is_near(values: torch.Tensor) -> bool:
    """Whether the host can look at ``values`` without waiting for a device."""
    return values.device.type == "cpu"


def take_rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return the given rows of ``values`` [R, ...], in rising order; all of them without a copy."""
    if len(rows) == len(values):
        return values
    return values.index_select(0, to_device(rows, torch.int64, values.device))


def send(arrays: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """Return the bytes of ``arrays`` one after another, uint8, on ``device``; see `unpack`."""
    starts = _starts(arrays)
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    into = packed.numpy()
    for array, start in zip(arrays, starts, strict=False):
        into[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed.to(device, non_blocking=True)


def unpack(packed: torch.Tensor, like: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return views of ``packed``: what `send` made of arrays of these shapes and types."""
    return [
        packed[start : start + array.nbytes]
        .view(getattr(torch, array.dtype.name))
        .view(array.shape)
        for array, start in zip(like, _starts(like), strict=False)
    ]


def _starts(arrays: Sequence[np.ndarray]) -> list[int]:
    """Return where each array begins, and the length of all."""
    sizes = (-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
    return [0, *accumulate(sizes)]
