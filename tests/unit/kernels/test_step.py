"""The native operations of a step against torch's, bit for bit or within named roundings."""

import itertools
import math

import pytest
import torch
from tests.native_operations import DTYPES, draw, multiply, run

from kv8.kernels.cpu import CpuKernels
from kv8.kernels.step import (
    MOST_ROWS,
    UNLIMITED,
    OperationList,
    can_multiply,
    gate_struct,
    linear_struct,
    most_rows,
    norm_struct,
    rotary_struct,
    scratch_size,
)

# Largest relative error of one rounding.
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Around the tiles of the tile unit (16 rows), the blocks of the vector loops, and one.
ROWS = (1, 2, 3, 4, 5, 16, 17, 33)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [4, 30, 32, 64, 100, 192])
@pytest.mark.parametrize("outputs", [1, 7, 16, 48, 160])
def test_products(kernels: CpuKernels, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    weight, bias = draw(outputs, inputs, dtype=dtype, seed=1), draw(outputs, dtype=dtype, seed=2)
    for num_rows in ROWS:
        x = draw(num_rows, inputs, dtype=dtype, seed=num_rows)
        found = multiply(kernels, x, weight, bias).double()
        expected = x.double() @ weight.double().T + bias.double()
        # A float32 sum of `inputs` products, each rounded at most once on the way; then one
        # rounding to the dtype.
        size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        bound = (inputs + 2) * EPS[torch.float32] * size + EPS[dtype] * expected.abs() * 1.01
        assert ((found - expected).abs() <= bound).all()


@pytest.mark.parametrize("multiplier", [1.0, 0.22])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_after_the_product_is_rounded(
    kernels: CpuKernels, dtype: torch.dtype, multiplier: float
) -> None:
    weight = draw(48, 64, dtype=dtype, seed=1)
    for num_rows in ROWS:
        x, residual = draw(num_rows, 64, dtype=dtype), draw(num_rows, 48, dtype=dtype, seed=3)
        found = multiply(kernels, x, weight, residual=residual, multiplier=multiplier)
        product = multiply(kernels, x, weight)
        if dtype is torch.float32:  # compilers may fuse product and sum
            bound = 2 * EPS[dtype] * (residual.abs() + 2 * product.abs())
            assert ((found - residual - product * multiplier).abs() <= bound).all()
        else:
            assert torch.equal(found, residual + product * multiplier)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours_nor_on_threads(
    kernels: CpuKernels, dtype: torch.dtype
) -> None:
    weight, x = draw(160, 96, dtype=dtype, seed=1), draw(40, 96, dtype=dtype)
    whole = multiply(kernels, x, weight)
    assert torch.equal(whole, multiply(kernels, x, weight, threads=1))
    for start, stop in itertools.pairwise((0, 7, 11, 28, 40)):
        assert torch.equal(multiply(kernels, x[start:stop], weight), whole[start:stop])
    alone = torch.cat([multiply(kernels, row, weight) for row in x.split(1)])
    assert torch.equal(alone, whole)


def test_rows_of_a_wider_tensor(kernels: CpuKernels) -> None:
    wide, weight = draw(6, 100, dtype=torch.bfloat16), draw(32, 64, dtype=torch.bfloat16, seed=1)
    for count in (1, 6):
        x = wide[:count, 20:84]
        assert torch.equal(multiply(kernels, x, weight), multiply(kernels, x.contiguous(), weight))


def test_the_more_inputs_the_sooner_products_are_left_to_torch(kernels: CpuKernels) -> None:
    def most(inputs: int, outputs: int = 32, dtype: torch.dtype = torch.bfloat16) -> int:
        return most_rows(kernels, torch.empty(outputs, inputs, dtype=dtype))

    if not kernels.has_matrix_unit:
        assert {most(inputs) for inputs in (32, 4096)} == {MOST_ROWS}
        return
    limits = [most(inputs) for inputs in (32, 2048, 2080, 4096, 4128, 14336)]
    assert limits == [UNLIMITED, UNLIMITED, 128, 128, MOST_ROWS, MOST_ROWS]
    # What the unit does not take.
    assert most(64, outputs=40) == most(48) == most(64, dtype=torch.float32) == MOST_ROWS


def test_what_can_be_multiplied() -> None:
    assert can_multiply(draw(3, 6, dtype=torch.bfloat16))
    assert not can_multiply(draw(3, 5, dtype=torch.bfloat16))  # rows that begin inside a word
    assert not can_multiply(draw(6, 3, dtype=torch.float32).T)
    assert not can_multiply(draw(6, 3, dtype=torch.float64))


def _smallest(dtype: torch.dtype) -> float:
    """Return the smallest normal number: below it, steps stay as they are there."""
    return float(torch.finfo(dtype).smallest_normal)


def last_bits(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the share of values that differ, having checked that they do so by one step."""
    step = 2 * EPS[expected.dtype] * expected.double().abs().clamp_min(_smallest(expected.dtype))
    # A factor that moves by one step moves a product by up to two.
    steps = 4 if expected.dtype is torch.float32 else 2
    assert ((found.double() - expected.double()).abs() <= steps * step).all()
    return float((found != expected).double().mean())


@pytest.mark.parametrize("size", [4, 16, 30, 576])
@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(kernels: CpuKernels, dtype: torch.dtype, order: int, size: int) -> None:
    weight = draw(size, dtype=dtype, seed=1)
    for num_rows, num_heads in ((1, 1), (5, 3), (257, 2)):
        x = draw(num_rows, num_heads * size, dtype=dtype, seed=2)
        out = torch.full_like(x, torch.nan)
        options = {"num_heads": num_heads, "epsilon": 1e-5, "order": order}
        run(kernels, norm_struct(weight, x, out, **options), num_rows)
        heads = x.view(num_rows, num_heads, size).float()
        n = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-5)
        expected = (weight * n.to(dtype), (n * (1 + weight.float())).to(dtype), weight * n)[order]
        # The mean is summed in another order, which moves a float32 by its last bits and a
        # narrower number in about one case of 2**(bits dropped).
        different = last_bits(out, expected.to(dtype).flatten(1))
        assert dtype is torch.float32 or different < 0.01
        residual = draw(*x.shape, dtype=dtype, seed=3)
        added = torch.full_like(x, torch.nan)
        run(kernels, norm_struct(weight, x, added, residual=residual, **options), num_rows)
        assert torch.equal(added, residual + out)
        run(kernels, norm_struct(weight, x, x, **options), num_rows)
        assert torch.equal(x, out)


@pytest.mark.parametrize("angles", ["own", "float32"])
@pytest.mark.parametrize("rotary", [4, 16, 10])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(kernels: CpuKernels, dtype: torch.dtype, rotary: int, angles: str) -> None:
    size, heads = 16, 3
    angle_dtype = dtype if angles == "own" else torch.float32
    for num_rows in (1, 5, 1500):
        x = draw(num_rows, heads * size + 7, dtype=dtype)
        kept = x.clone()
        cos, sin = (draw(num_rows, rotary, dtype=angle_dtype, seed=s) for s in (1, 2))
        part = x[:, : heads * size]
        run(kernels, rotary_struct(part, cos, sin, num_heads=heads), num_rows)
        before = kept[:, : heads * size].view(num_rows, heads, size)[..., :rotary]
        low, high = before.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
        expected = (before * cos[:, None] + turned * sin[:, None]).to(dtype)
        found = part.reshape(num_rows, heads, size)
        assert torch.equal(found[..., :rotary], expected)
        found[..., :rotary] = before
        assert torch.equal(found.flatten(1), kept[:, : heads * size])
        assert torch.equal(x[:, heads * size :], kept[:, heads * size :])


@pytest.mark.parametrize("function", range(2))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(kernels: CpuKernels, dtype: torch.dtype, function: int) -> None:
    for num_rows, size in ((1, 5), (3, 1030), (40, 512)):
        both = draw(num_rows, 2 * size, dtype=dtype) * 6
        both.view(-1)[:4] = torch.tensor([0.0, -0.0, 60.0, -60.0])
        gate, up = both.chunk(2, dim=1)
        out = torch.full((num_rows, size), torch.nan, dtype=dtype)
        run(kernels, gate_struct(gate, up, out, function=function), num_rows)
        exact, argument = gate.double(), gate.double().abs()
        if function == 0:
            activated = torch.nn.functional.silu(exact)
        else:
            # torch's own spelling, 1 + tanh, cancels where the result is small.
            inner = (2 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3)
            activated = exact * torch.sigmoid(2 * inner)
            argument = argument**3  # what the exponential gets grows with the cube
        expected = activated * up.double()
        # Two roundings; the function itself is exact to some float32 steps of its argument.
        bound = (2.1 * EPS[dtype] + 16 * EPS[torch.float32] * (1 + argument)) * expected.abs()
        # Steps of subnormal numbers; and an exponential beyond e**87 counts as infinite.
        tiny = 2 * EPS[dtype] * _smallest(dtype) * (1 + up.double().abs())
        tiny = tiny + exact.abs() * math.exp(-87) * up.double().abs()
        assert ((out.double() - expected).abs() <= bound + tiny).all()


def test_gates_of_what_is_no_number(kernels: CpuKernels) -> None:
    gate = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]])
    up = torch.tensor([[1.0, 2.0, 1.0, torch.nan]])
    out = torch.zeros(1, 4)
    run(kernels, gate_struct(gate, up, out, function=0), 1)
    expected = torch.nn.functional.silu(gate) * up
    assert out.isnan().tolist() == [[True, False, True, True]] == expected.isnan().tolist()
    assert out[0, 1] == torch.inf


@pytest.mark.parametrize("threads", [1, 2])
def test_a_list_runs_in_order(kernels: CpuKernels, threads: int) -> None:
    dtype = torch.bfloat16
    x, weight, norm = draw(9, 64, dtype=dtype), draw(96, 64, dtype=dtype), draw(64, dtype=dtype)
    normed, out = torch.empty_like(x), torch.empty(9, 96, dtype=dtype)
    scratch = torch.empty(scratch_size(9, 64))
    operations = [
        norm_struct(norm, x, normed, num_heads=1, epsilon=1e-6, order=0),
        linear_struct(weight, None, normed, out, scratch),
    ]
    OperationList(kernels, operations).run(9, threads)
    assert torch.equal(out, multiply(kernels, normed, weight))
