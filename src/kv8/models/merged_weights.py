"""Several projections of the same input as one: one product instead of two or three.

The weights move into one tensor, and every module's own weight becomes a view of its part. So
memory does not double, names and shapes stay, and whoever writes to a module's weight
(`Engine.update_weights`) writes to the merged one.
"""

from collections.abc import Sequence

import torch
from torch import nn

from kv8.models.torch_product import torch_product
from kv8.models.weight_memory import WeightMemory


class Merged:
    """Projections of one input, side by side.

    Args:
        linears: plain linear layers with equal inputs.
        memory: where the weights go; `None` for memory of their own, or where they are if there is
            one only.

    Attributes:
        weight: [O, I], the layers' weights one after another.
        bias: [O] or `None`; zeros where only some have one.
    """

    def __init__(self, linears: Sequence[nn.Linear], memory: WeightMemory | None = None) -> None:
        self.weight = _merge([linear.weight for linear in linears], memory)
        biases = [linear.bias for linear in linears]
        self.bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            given = [
                linear.bias if linear.bias is not None else _zeros(linear) for linear in linears
            ]
            self.bias = _merge(given)

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write the projections [T, O] of ``x`` [T, I], by torch."""
        torch_product(x, self.weight, self.bias, out)


def _zeros(linear: nn.Linear) -> torch.Tensor:
    return linear.weight.new_zeros(linear.out_features)


def _merge(tensors: Sequence[torch.Tensor], memory: WeightMemory | None = None) -> torch.Tensor:
    """Return the tensors one after another; each of them becomes a view of the result."""
    if memory is not None:
        merged = torch.cat([tensor.data for tensor in tensors], out=memory.take(tensors))
    elif len(tensors) == 1:
        return tensors[0].data
    else:
        merged = torch.cat([tensor.data for tensor in tensors])
    start = 0
    for tensor in tensors:
        tensor.data = merged[start : start + len(tensor)]
        start += len(tensor)
    return merged
