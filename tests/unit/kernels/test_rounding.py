"""Norms, rotary embedding and gates against plain references, bit for bit: wherever a model's own
modules round, for lengths that fill no vector, in wider tensors, and for what is no number."""

import pytest
import torch
from tests.native_operations import DTYPES, assert_same, draw, framed, run, unusual

from kv8.kernels.cpu import CpuKernels
from kv8.kernels.step import gate_struct, norm_struct, rotary_struct

# Around the vectors of all builds: 4 to 32 values.
SIZES = (1, 2, 3, 5, 8, 16, 31, 32, 33, 64, 100)


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return the same values as part of a wider tensor, at an odd place."""
    return torch.nn.functional.pad(x, (1, 4), value=torch.nan)[:, 1:-4]


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Return the kernels' float32 sums over the last dimension: sixteen words side by side."""
    values_per_word = 4 // x.element_size()
    group = 16 * values_per_word
    squares = torch.nn.functional.pad(x.float().square(), (0, -x.shape[-1] % group))
    lanes = torch.zeros(*x.shape[:-1], group)
    for part in squares.split(group, dim=-1):
        lanes = lanes + part
    lanes = lanes.unflatten(-1, (16, values_per_word)).mT.flatten(-2)
    while lanes.shape[-1] > 1:
        low, high = lanes.chunk(2, dim=-1)
        lanes = low + high
    return lanes


def normed(x: torch.Tensor, weight: torch.Tensor, order: int) -> torch.Tensor:
    """Return x [..., D] over its root mean square, times ``weight`` [D]."""
    root = (
        (sum_of_squares(x) / x.shape[-1] + 1e-5).double().sqrt().float()
    )  # torch's own is inexact
    n = x.float() * (1 / root)
    if order == 0:
        return weight * n.to(x.dtype)
    return (n * (1 + weight.float() if order == 1 else weight.float())).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", range(3))
def test_norms(kernels: CpuKernels, dtype: torch.dtype, order: int) -> None:
    for size in (*SIZES, 576):
        weight = draw(size, dtype=dtype, seed=1)
        for num_rows, num_heads in ((1, 1), (5, 3)):
            shape = num_rows, num_heads * size
            x, residual = (wide(draw(*shape, dtype=dtype, seed=s)) for s in (2, 3))
            x[0, : len(unusual(dtype))] = unusual(dtype)[: x.shape[1]]
            x[-1, -1] = torch.finfo(dtype).tiny / 2
            expected = normed(x.unflatten(-1, (num_heads, size)), weight, order).flatten(1)
            options = {"num_heads": num_heads, "epsilon": 1e-5, "order": order}
            with framed(*x.shape, dtype) as out:
                run(kernels, norm_struct(weight, x, out, **options), num_rows)
            assert_same(out, expected)
            with framed(*x.shape, dtype) as out:
                run(kernels, norm_struct(weight, x, out, residual=residual, **options), num_rows)
            assert_same(out, residual + expected)


@pytest.mark.parametrize("angles", ["own", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(kernels: CpuKernels, dtype: torch.dtype, angles: str) -> None:
    angle_dtype = dtype if angles == "own" else torch.float32
    for half in SIZES:
        size, num_heads, num_rows = 2 * half + 3, 3, 4
        before = draw(num_rows, num_heads, size, dtype=dtype)
        before[0, 0, : len(unusual(dtype))] = unusual(dtype)[:size]
        cos, sin = (draw(num_rows, 2 * half, dtype=angle_dtype, seed=s) for s in (1, 2))
        cos[1, : len(unusual(dtype))] = unusual(dtype)[: 2 * half].to(angle_dtype)
        with framed(num_rows, num_heads * size, dtype) as x:
            x.copy_(before.flatten(1))
            run(kernels, rotary_struct(x, cos, sin, num_heads=num_heads), num_rows)
        low, high = before[..., :half], before[..., half : 2 * half]
        cos_low, cos_high = cos[:, None].chunk(2, dim=-1)
        sin_low, sin_high = sin[:, None].chunk(2, dim=-1)
        expected = before.clone()
        expected[..., :half] = (low * cos_low - high * sin_low).to(dtype)
        expected[..., half : 2 * half] = (high * cos_high + low * sin_high).to(dtype)
        assert_same(x, expected.flatten(1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_number_is_rounded_to_nearest_even(
    kernels: CpuKernels, dtype: torch.dtype
) -> None:
    # All upper halves of float32 with lower halves about the ties of bfloat16, and numbers between
    # the subnormals of float16 with any lower halves.
    uppers = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    lowers = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    about_ties = (uppers[:, None] | lowers).flatten().view(torch.float32)
    halves = torch.arange(2**13) * 2.0**-25
    values = torch.cat([about_ties, halves, -halves.nextafter(torch.tensor(1.0))])
    angles = torch.nn.functional.pad(values, (0, -len(values) % 32)).view(-1, 32)
    # Turned by these angles, (1, 0) becomes them.
    x = torch.cat([torch.ones_like(angles), torch.zeros_like(angles)], dim=1).to(dtype)
    cos, sin = torch.cat([angles, angles], dim=1), torch.zeros(len(x), 64)
    run(kernels, rotary_struct(x, cos, sin, num_heads=1), len(x))
    assert_same(x[:, :32], angles.to(dtype))


def gated(kernels: CpuKernels, gate: torch.Tensor, up: torch.Tensor, function: int) -> torch.Tensor:
    """Return f(gate) * up, both read from one wider tensor."""
    both = wide(torch.cat([gate, up], dim=1))
    with framed(*gate.shape, gate.dtype) as out:
        run(kernels, gate_struct(*both.chunk(2, dim=1), out, function=function), len(gate))
    return out


@pytest.mark.parametrize("function", range(2))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(kernels: CpuKernels, dtype: torch.dtype, function: int) -> None:
    """An activation does not depend on where it stands; it is rounded, then multiplied."""
    for size in (*SIZES, 1023, 1024, 1025, 1056):
        gate, up = (draw(3, size, dtype=dtype, seed=s) * 6 for s in (1, 2))
        gate[0, : len(unusual(dtype))] = unusual(dtype)[:size]
        up[1, : len(unusual(dtype))] = unusual(dtype)[:size]
        one_by_one = gated(
            kernels, gate.view(-1, 1), torch.ones(3 * size, 1, dtype=dtype), function
        )
        assert_same(gated(kernels, gate, up, function), one_by_one.view(3, size) * up)


@pytest.mark.parametrize("function", range(2))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_of_all_numbers(kernels: CpuKernels, dtype: torch.dtype, function: int) -> None:
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(256, 256)
    found = gated(kernels, gate, torch.ones_like(gate), function)
    x = gate.double()
    inner = x if function == 0 else 2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    exact = x * torch.sigmoid(inner)
    assert torch.equal(found.isnan(), exact.isnan())
    # The float32 before the last rounding is exact to some 2**-20.
    least = max(1e-35, torch.finfo(dtype).tiny)
    large = exact.abs() >= least
    step = found.view(torch.int16).int() - exact.to(dtype).view(torch.int16).int()
    assert step[large].abs().max() <= 1
    assert step[large].abs().double().mean() < 0.01
    # Below, one step of subnormal numbers. An exponential above 2**127 may count as infinite, that
    # is from about -88 on.
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps + 89 * 2.0**-127
    assert (found.double() - exact)[exact.abs() < least].abs().max() <= tiny
