"""Runs single native operations on tensors, and watches the memory around what they write."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kv8.kernels.cpu import CpuKernels
from kv8.kernels.step import OperationList, linear_struct, scratch_size
from kv8.kernels.step_structs import Operation

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of each value; of NaN, which may have any sign and payload, always the same.

    Zeros have their signs.
    """
    return torch.where(x.isnan(), torch.nan, x).view(BITS[x.dtype])


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(bits(found.contiguous()), bits(expected.contiguous()))


def unusual(dtype: torch.dtype) -> torch.Tensor:
    """Return zeros, subnormal and extreme numbers, and what is none, with both signs."""
    info = torch.finfo(dtype)
    some = torch.tensor([0.0, info.tiny, info.tiny / 2, info.max, torch.inf, torch.nan, 1.0])
    return torch.cat([some, -some]).to(dtype)


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
    scratch = torch.full((scratch_size(len(x), x.shape[1]),), torch.nan)
    with framed(len(x), len(weight), x.dtype) as out:
        operation = linear_struct(weight, bias, x, out, scratch, **options)  # type: ignore[arg-type]
        run(kernels, operation, len(x), threads=threads)
    return out.clone()
