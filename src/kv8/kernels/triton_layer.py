"""Launches of the Triton kernels between a decoder layer's matrix products.

Rows are [T, ...] tensors of one dtype whose last dimension is contiguous. A launch never waits for
the device.
"""

from typing import Final

import torch

from kv8.kernels.triton_elementwise import gate_kernel, norm_kernel, rotary_kernel

_GATE_BLOCK: Final = 1024
_ROTARY_HEADS: Final = 8


def norm_rows(x: torch.Tensor, weight: torch.Tensor, epsilon: float, order: int) -> torch.Tensor:
    """Return ``x`` [T, D] with each row normed, or each of its heads as long as ``weight``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    heads = x.shape[1] // weight.shape[0]
    _run_norm(x, weight, epsilon, order, out, heads=heads)
    return out


def add_and_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    order: int,
    multiplier: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``residual + multiplier * x``, and the norm of its rows, all [T, D]."""
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    out = torch.empty_like(total)
    _run_norm(x, weight, epsilon, order, out, added=(residual, total, multiplier))
    return total, out


def _run_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    order: int,
    out: torch.Tensor,
    *,
    heads: int = 1,
    added: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """Write ``out``; ``added``: a residual, where its sum with ``x`` goes, x's multiplier."""
    size = weight.shape[0]
    residual, total, multiplier = (None, None, 1.0) if added is None else added
    padded = _power_of_two(size)
    norm_kernel[(len(x), heads)](
        x, residual, weight, total, out,
        x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0),
        epsilon, multiplier,
        SIZE=size,
        PADDED=padded,
        ORDER=order,
        MULTIPLIES=multiplier != 1.0,
        num_warps=min(16, max(1, padded // 256)),
    )  # fmt: skip


def rotate(x: torch.Tensor, head_dim: int, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Rotate the heads of ``x`` [T, heads * D] in place by angles [T, rotary], rotary at most D."""
    num_heads, half = x.shape[1] // head_dim, cosines.shape[1] // 2
    assert cosines.stride() == sines.stride(), "cosines and sines lie in different ways"
    grid = (len(x), -(-num_heads // _ROTARY_HEADS))
    rotary_kernel[grid](
        x, cosines, sines, x.stride(0), cosines.stride(0), num_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        PADDED_HALF=_power_of_two(half),
        HEADS=_ROTARY_HEADS,
        num_warps=2,
    )  # fmt: skip


def gated(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    """Return the activation of ``gate`` times ``up``, all [T, I]."""
    num_rows, size = gate.shape
    out = gate.new_empty(num_rows, size)
    gate_kernel[(num_rows, -(-size // _GATE_BLOCK))](
        gate, up, out, gate.stride(0), up.stride(0), out.stride(0), size,
        BLOCK=_GATE_BLOCK,
        ACTIVATION=activation,
        num_warps=4,
    )  # fmt: skip
    return out


def _power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()
