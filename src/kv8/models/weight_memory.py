"""Memory for the weights of fused layers: one piece, in the order in which a step reads them.

Most of a decode step is reading weights once, from memory, faster than a processor's tables of
pages follow in small pages. In one piece they can lie in large ones, and the end of one weight
leads on to the next.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from kv8.kernels.cpu import CpuKernels

_ALIGNMENT: Final = 64  # bytes of a cache line


class WeightMemory:
    """Room for weights, given out from the start.

    Args:
        num_bytes: what all of `room_for` come to.
        kernels: ask the system for large pages.
    """

    def __init__(self, num_bytes: int, kernels: CpuKernels) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        kernels.prefer_large_pages(self._memory)
        self._used = 0

    def take(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return an uninitialised tensor for ``tensors`` (one dtype), one after another."""
        first, size = tensors[0], sum(tensor.nbytes for tensor in tensors)
        start, self._used = self._used, self._used + room_for(tensors)
        assert self._used <= len(self._memory), "more weights than were counted"
        num_rows = sum(len(tensor) for tensor in tensors)
        flat = self._memory[start : start + size].view(first.dtype)
        return flat.view(num_rows, *first.shape[1:])


def gather(parameters: Sequence[nn.Parameter], kernels: CpuKernels) -> None:
    """Move parameters into one piece of memory; each stays the object it is."""
    distinct = list({id(parameter): parameter for parameter in parameters}.values())
    memory = WeightMemory(sum(room_for([p]) for p in distinct), kernels)
    for parameter in distinct:
        room = memory.take([parameter])
        parameter.data = room.copy_(parameter.data)


def room_for(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes that ``tensors`` take, one after another."""
    return -(-sum(tensor.nbytes for tensor in tensors) // _ALIGNMENT) * _ALIGNMENT
