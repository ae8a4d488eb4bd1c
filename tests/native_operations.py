"""Runs single native operations on tensors, and watches the memory around what they write."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kv8.kernels.cpu import CpuKernels
from kv8.kernels.step import Operation, OperationList, linear_struct, scratch_size

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def run(kernels: CpuKernels, operation: Operation, num_rows: int, *, threads: int = 2) -> None:
    OperationList(kernels, [operation]).run(num_rows, threads)


@contextmanager
def framed(num_rows: int, width: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Give an output [num_rows, width]; what surrounds it in memory must stay as it was."""
    frame = torch.full((num_rows + 2, width + 3), torch.nan, dtype=dtype)
    out = frame[1:-1, :width]
    yield out
    written = out.clone()
    out.fill_(torch.nan)
    assert frame.isnan().all()
    out.copy_(written)


def multiply(
    kernels: CpuKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    threads: int = 2,
    **options: object,
) -> torch.Tensor:
    """Return a product."""
    num_rows = len(x)
    scratch = torch.full((scratch_size(num_rows, x.shape[1]),), torch.nan)
    with framed(num_rows, len(weight), x.dtype) as out:
        operation = linear_struct(weight, bias, x, out, scratch, **options)  # type: ignore[arg-type]
        run(kernels, operation, num_rows, threads=threads)
    return out.clone()
