"""What a product does with its sums, bit for bit: bias, rounding, multiplier, residual.

All sums are of small whole numbers, hence exact in whatever order a build adds them up.
"""

import pytest
import torch
from tests.native_operations import DTYPES, assert_same, draw, framed, multiply, run, unusual

from kv8.kernels.cpu import CpuKernels
from kv8.kernels.step import gate_struct, linear_struct, scratch_size
from kv8.kernels.step_structs import GatedStruct


def whole_numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-7, 8, shape, generator=generator).to(dtype)


def finished(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    multiplier: float,
) -> torch.Tensor:
    """Return what a model's modules make of it: each of them rounds what it returns."""
    product = (x.double() @ weight.double().T).float()
    if bias is not None:
        product = product + bias.float()
    product = product.to(x.dtype)
    return product if residual is None else residual + product * multiplier


# 0.25 changes no mantissa: compilers may fuse the multiplication and the sum of float32.
CASES = [
    (dtype, m) for dtype in DTYPES for m in (1.0, 0.25, 0.22) if (dtype, m) != (DTYPES[0], 0.22)
]


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "multiplier"), CASES)
def test_finishing(
    kernels: CpuKernels, dtype: torch.dtype, multiplier: float, with_bias: bool, with_residual: bool
) -> None:
    some = unusual(dtype)
    for outputs in (1, 7, 16, 48, 160):
        weight = whole_numbers(outputs, 96, dtype=dtype, seed=1)
        bias = draw(outputs, dtype=dtype, seed=2) * 50
        bias[-len(some) :] = some[-outputs:]
        for num_rows in (1, 3, 4, 15, 16, 17, 33, 64, 65, 203):
            x = whole_numbers(num_rows, 96, dtype=dtype, seed=num_rows)
            x[-1, 5] = torch.inf
            # A part of a wider tensor, as the output is.
            residual = draw(num_rows, outputs + 5, dtype=dtype, seed=3)[:, 2:-3] * 50
            residual[num_rows // 2, : len(some)] = some[:outputs]
            add = (bias if with_bias else None, residual if with_residual else None)
            found = multiply(kernels, x, weight, add[0], residual=add[1], multiplier=multiplier)
            assert_same(found, finished(x, weight, *add, multiplier))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_of_many_inputs(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """They go by in parts on the tile unit."""
    weight = whole_numbers(144, 4096, dtype=dtype, seed=1)
    x = whole_numbers(230, 4096, dtype=dtype, seed=2)
    residual = draw(230, 144, dtype=dtype, seed=3)
    found = multiply(kernels, x, weight, residual=residual)
    assert_same(found, finished(x, weight, None, residual, 1.0))


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 576), (160, 1024), (80, 2048)])
def test_many_rows_get_what_few_get(kernels: CpuKernels, outputs: int, inputs: int) -> None:
    """Bit for bit, whatever rows are beside a row, or none.

    On the matrix unit, one row is not packed; for many rows the weight is, and some rows are
    computed twice; sums of many inputs wait in memory.
    """
    weight = draw(outputs, inputs, dtype=torch.bfloat16, seed=1)
    bias = draw(outputs, dtype=torch.bfloat16, seed=2)
    some = unusual(torch.bfloat16)
    for num_rows in (65, 130, 193, 519):
        x = draw(num_rows, inputs + 8, dtype=torch.bfloat16, seed=num_rows)[:, 3:-5]
        residual = draw(num_rows, outputs + 5, dtype=torch.bfloat16, seed=3)[:, 2:-3]
        x[num_rows // 2, : len(some)], x[-1, 5], x[0, 7] = some, torch.inf, torch.nan
        for add, rest, multiplier in ((None, None, 1.0), (bias, None, 1.0), (bias, residual, 0.22)):
            many = multiply(kernels, x, weight, add, residual=rest, multiplier=multiplier)
            parts = [slice(first, first + 16) for first in range(0, num_rows - 16, 16)]
            parts += [slice(t, t + 1) for t in (0, num_rows // 2, num_rows - 17)]
            for rows in (*parts, slice(num_rows - 16, num_rows), slice(num_rows - 1, num_rows)):
                before = None if rest is None else rest[rows]
                few = multiply(
                    kernels, x[rows], weight, add, residual=before, multiplier=multiplier
                )
                assert_same(many[rows], few)


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(4128, 576), (2000, 1056), (16 * 1031, 64), (32, 32 * 1024)]
)
def test_threads_share_outputs_and_help_each_other(
    kernels: CpuKernels, outputs: int, inputs: int
) -> None:
    """Weights of more and of less than each thread packs at once; more threads than shares."""
    weight = whole_numbers(outputs, inputs, dtype=torch.bfloat16, seed=1)
    x = whole_numbers(545, inputs, dtype=torch.bfloat16, seed=2)
    scratch = torch.empty(scratch_size(545, inputs))
    expected = (x.float() @ weight.float().T).bfloat16()
    for threads in (1, 2, 3, 8):
        with framed(545, outputs, torch.bfloat16) as out:
            run(kernels, linear_struct(weight, None, x, out, scratch), 545, threads=threads)
            assert_same(out, expected)


def test_subnormal_products_of_many_rows_are_not_lost(kernels: CpuKernels) -> None:
    """A conversion that takes them for zero stands in for exact rounding where there are none."""
    smallest = torch.finfo(torch.bfloat16).smallest_normal
    x = torch.zeros(200, 32, dtype=torch.bfloat16)
    x[:, 0] = torch.linspace(-2, 2, 200).bfloat16()
    weight = torch.zeros(48, 32, dtype=torch.bfloat16)
    weight[:, 0] = 1
    bias = torch.full((48,), smallest / 2, dtype=torch.bfloat16)
    weight[::3, 0], bias[1::3] = 0, 0
    assert_same(multiply(kernels, x, weight, bias), finished(x, weight, bias, None, 1.0))


@pytest.mark.parametrize("num_rows", [50, 203, 519])
def test_the_residual_may_be_the_output(kernels: CpuKernels, num_rows: int) -> None:
    weight, x = (whole_numbers(n, 64, dtype=torch.bfloat16, seed=n) for n in (112, num_rows))
    residual = draw(num_rows, 112, dtype=torch.bfloat16)
    expected = finished(x, weight, None, residual, 1.0)
    scratch = torch.empty(scratch_size(num_rows, 64))
    run(kernels, linear_struct(weight, None, x, residual, scratch, residual=residual), num_rows)
    assert_same(residual, expected)


@pytest.mark.parametrize("function", range(2))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gating_at_once_is_gating_afterwards(
    kernels: CpuKernels, dtype: torch.dtype, function: int
) -> None:
    some = unusual(dtype)
    # Several blocks of outputs with one left over, none whole; more inputs than go at once.
    # At last, shares of less than two blocks.
    sizes = ((80, 64, 1), (80, 64, 203), (24, 32, 192), (32, 1216, 530), (48, 8192, 200))
    for size, inputs, num_rows in sizes:
        if inputs > 1000 and dtype is not torch.bfloat16:
            continue
        weight = whole_numbers(2 * size, inputs, dtype=dtype, seed=1)
        bias = None if num_rows == 192 else draw(2 * size, dtype=dtype, seed=2) * 20
        if bias is not None:
            bias[-len(some) :], bias[: len(some)] = some, some.flip(0)
        x = whole_numbers(num_rows, inputs, dtype=dtype, seed=num_rows)
        x[-1, 5] = torch.inf
        both = multiply(kernels, x, weight, bias)
        expected = torch.empty(num_rows, size, dtype=dtype)
        gate, up = both.chunk(2, dim=1)
        run(kernels, gate_struct(gate, up, expected, function=function), num_rows)
        scratch = torch.empty(scratch_size(num_rows, inputs))
        product = linear_struct(weight, bias, x, both, scratch)
        for threads in (1, 2):
            with framed(num_rows, size, dtype) as out:
                both.fill_(torch.nan)
                gating = gate_struct(gate, up, out, function=function)
                run(kernels, GatedStruct(product, gating), num_rows, threads=threads)
                assert_same(out, expected)
