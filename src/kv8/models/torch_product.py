"""torch's matrix products on a CPU, over numbers of rows that come again.

In 16 bits torch multiplies by oneDNN, which compiles a kernel for every number of rows it meets
and keeps it: measured, 1 ms and 0.6 MB each, whatever its cache is limited to. Prefill meets any
number, so a server would grow on and on. So whole steps of rows are multiplied by themselves, and
what is left of the last step is filled up: there are few of either.
"""

from typing import Final

import torch

_STEP: Final = 64
_SMALL_STEP: Final = 16  # of what is left, so that it does not cost twice


def torch_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write ``x @ weight.T + bias`` to ``out``.

    Args:
        x: [T, I].
        weight: [O, I].
        bias: [O] or `None`.
        out: [T, O].
    """
    if x.device.type != "cpu" or x.dtype == torch.float32:
        _multiply(x, weight, bias, out)
        return
    whole = len(x) // _STEP * _STEP
    left = len(x) - whole
    if whole > 0:
        _multiply(x[:whole], weight, bias, out[:whole])
    if left > 0:
        filled = x.new_zeros(filled_rows(left), x.shape[1])
        filled[:left] = x[whole:]
        product = out.new_empty(len(filled), out.shape[1])
        _multiply(filled, weight, bias, product)
        out[whole:] = product[:left]


def filled_rows(num_rows: int) -> int:
    """Return how many rows are computed for the last ``num_rows``, fewer than a step's."""
    return -(-num_rows // _SMALL_STEP) * _SMALL_STEP


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
