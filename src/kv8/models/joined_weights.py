"""Weights of layers that read the same input, laid one after another: one product makes all.

On a GPU a product of few rows is as fast as its weights are read, if they are enough to keep all of
it busy; those of keys and values alone are not. Nothing is held twice: each layer's parameter
becomes a view of the common memory, so names, `state_dict` and updates in place stay as they were.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import linear


class JoinedLinears:
    """Linear layers of one input, as one.

    Args:
        layers: at least one. Where they differ in type, device, or in having a bias, each makes its
            own product.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._products: list[tuple[torch.Tensor, torch.Tensor | None]]
        self._products = [(layer.weight, layer.bias) for layer in layers]
        kinds = {(w.dtype, w.device, bias is None) for w, bias in self._products}
        if len(layers) > 1 and len(kinds) == 1:
            biases = [layer.bias for layer in layers if layer.bias is not None]
            weight = _join([layer.weight for layer in layers])
            self._products = [(weight, _join(biases) if biases else None)]

    @property
    def is_one(self) -> bool:
        """Whether there is one product, in which the parts lie side by side."""
        return len(self._products) == 1

    def __call__(self, x: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return the products of rows ``x`` [T, C], in parts of ``sizes``: [T, size] each.

        Where it `is_one`, sizes of neighbours may be given together.
        """
        products = [linear(x, weight, bias) for weight, bias in self._products]
        return torch.split_with_sizes(products[0], sizes, dim=1) if self.is_one else products


def _join(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parameters' values, first dimensions one after another; they become its views."""
    joined = torch.cat([parameter.data for parameter in parameters])
    sizes = [len(parameter) for parameter in parameters]
    for parameter, part in zip(parameters, torch.split_with_sizes(joined, sizes), strict=True):
        parameter.data = part
    return joined
