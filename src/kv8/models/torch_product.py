"""torch's matrix products on a CPU, over numbers of rows that come again.

In 16 bits torch multiplies by oneDNN, which compiles a kernel for every number of rows it meets
and keeps it: measured, 1 ms and 0.6 MB each, whatever its cache is limited to. Prefill meets any
number, so a server would grow on and on. Rounded up there are a few dozen, and filling up is
cheaper than compiling.
"""

from typing import Final

import torch

# Fewer rows than this are rounded up less, so that they do not cost twice.
_MANY: Final = 64
_FEW_STEP: Final = 16


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
    num_rows = len(x)
    wanted = rounded_rows(num_rows)
    if wanted == num_rows or x.device.type != "cpu" or x.dtype == torch.float32:
        _multiply(x, weight, bias, out)
        return
    filled = x.new_zeros(wanted, x.shape[1])
    filled[:num_rows] = x
    product = out.new_empty(wanted, out.shape[1])
    _multiply(filled, weight, bias, product)
    out.copy_(product[:num_rows])


def rounded_rows(num_rows: int) -> int:
    """Return the number of rows computed in place of ``num_rows``, one of few."""
    step = _FEW_STEP if num_rows < _MANY else _MANY
    return -(-num_rows // step) * step


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
