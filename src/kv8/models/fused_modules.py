"""Linear layers and norms outside of fused decoder layers, computed by native kernels."""

import torch
from torch import nn

from kv8.kernels.cpu import CpuKernels
from kv8.kernels.step import linear_struct, most_rows, norm_struct, run_one
from kv8.models.decoder_parts import Norm
from kv8.models.torch_product import torch_product
from kv8.models.workspace import Workspace


class FusedLinear:
    """Stands in for a plain linear layer's ``forward``; many rows are left to torch.

    The weight is looked up with every call: it may be tied to another module's.

    Attributes:
        most_native: rows up to which the product is a native one.
    """

    def __init__(self, module: nn.Linear, kernels: CpuKernels, workspace: Workspace) -> None:
        self._module, self._kernels, self._workspace = module, kernels, workspace
        self.most_native = most_rows(kernels, module.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the projection of ``x`` [..., I], [..., O]."""
        weight, bias = self._module.weight, self._module.bias
        rows = x.reshape(-1, x.shape[-1])
        num_rows = rows.shape[0]
        if num_rows == 0 or rows.dtype != weight.dtype or rows.stride(1) != 1:
            return nn.functional.linear(x, weight, bias)
        out = torch.empty(num_rows, weight.shape[0], dtype=x.dtype)
        if num_rows > self.most_native:
            torch_product(rows, weight, bias, out)
            return out.view(*x.shape[:-1], -1)
        scratch = self._workspace.scratch(rows.shape[1], num_rows)
        operation = linear_struct(weight, bias, rows, out, scratch)
        run_one(self._kernels, operation, num_rows)
        return out.view(*x.shape[:-1], -1)


class FusedNorm:
    """Stands in for a root mean square norm's ``forward``."""

    def __init__(self, norm: Norm, kernels: CpuKernels) -> None:
        self._norm, self._kernels = norm, kernels
        self._original = type(norm.module).forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [..., D], normed."""
        weight = self._norm.weight
        if x.dtype != weight.dtype or x.numel() == 0:
            output: torch.Tensor = self._original(self._norm.module, x)
            return output
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        operation = norm_struct(
            weight, rows, out, num_heads=1, epsilon=self._norm.epsilon, order=self._norm.order
        )
        run_one(self._kernels, operation, rows.shape[0])
        return out.view(x.shape)
