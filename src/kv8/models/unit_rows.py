"""A decoder layer over many rows on a matrix unit: native operations only, listed once a step.

What is not attention goes through the layer block by block, in memory that all layers use again
and again: it stays in the CPU's cache. A block is one call before attention and one after it; from
block to block only addresses change.
"""

import ctypes
from collections.abc import Sequence
from typing import Final

import torch

from kv8.kernels.step import MOST_SCRATCH_ROWS, OperationList, gate_struct, linear_struct
from kv8.kernels.step_structs import GatedStruct, LinearStruct, Operation
from kv8.models.decoder_parts import Norm
from kv8.models.layer_operations import LayerOperations
from kv8.models.merged_weights import Merged
from kv8.models.workspace import Workspace

# All of a step, mostly: products share out rows so that they stay in the cores' caches.
_BLOCK_ROWS: Final = 2048


class UnitRows:
    """Computes one layer over any number of rows.

    Args:
        layer: its parts; products are native ones.
        space: shared with the model's other layers.
    """

    def __init__(self, layer: LayerOperations, space: Workspace) -> None:
        self._layer, self._space = layer, space
        self._hidden = layer.output.weight.shape[0]

    def run(self, x: torch.Tensor, cos_sin: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """Return the layer's output [T, C] for ``x`` [T, C], contiguous.

        ``cos_sin`` are the angles' cosines and sines, if the layer rotates.
        """
        layer = self._layer
        qkv = self._space.many_rows("qkv", len(x), layer.qkv.weight.shape[0])
        self._describe_before(x, cos_sin, qkv).run(len(x))
        mixed = layer.attend(*layer.heads(qkv))
        out = torch.empty_like(x)
        if layer.gate_up is not None and layer.down is not None:
            self._describe_after(x, mixed, out).run(len(x))
            return out
        joined, normed = _Blocks(layer, self._space), out
        self._add(joined, layer.output, mixed, x, layer.parts.after_attention, out)
        if layer.parts.before_mlp is not None:
            normed = torch.empty_like(x)
            joined.append(layer.norm(layer.parts.before_mlp, out, normed), x=out, out=normed)
        joined.run(len(x))
        return layer.add_other_mlp(out, normed)

    def _describe_before(
        self, x: torch.Tensor, cos_sin: Sequence[torch.Tensor] | None, qkv: torch.Tensor
    ) -> "_Blocks":
        """Describe what writes queries and keys, normed and rotated, and values."""
        layer, parts, blocks = self._layer, self._layer.parts, _Blocks(self._layer, self._space)
        normed = self._norm(blocks, parts.before_attention, x)
        blocks.append(self._product(layer.qkv, normed, qkv), x=normed, out=qkv)
        q, k, _ = layer.split(qkv)
        for norm, side in ((parts.q_norm, q), (parts.k_norm, k)):
            if norm is not None:
                blocks.append(layer.norm(norm, side, side), x=side, out=side)
        if cos_sin is not None:
            cos, sin = self._space.angles(cos_sin)
            blocks.append(layer.rotary(qkv, cos, sin), x=qkv, cos=cos, sin=sin)
        return blocks

    def _describe_after(self, x: torch.Tensor, mixed: torch.Tensor, out: torch.Tensor) -> "_Blocks":
        """Describe what adds attention and the MLP to the residual ``x``."""
        layer, parts, blocks = self._layer, self._layer.parts, _Blocks(self._layer, self._space)
        assert layer.gate_up is not None
        assert layer.down is not None
        self._add(blocks, layer.output, mixed, x, parts.after_attention, out)
        normed = self._norm(blocks, parts.before_mlp, out)
        both = blocks.rows("gate and up", layer.gate_up.weight.shape[0])
        gate, up = both.chunk(2, dim=1)
        inner = blocks.rows("inner", gate.shape[1])
        gating = gate_struct(gate, up, inner, function=parts.activation)
        gated = GatedStruct(self._product(layer.gate_up, normed, both), gating)
        blocks.append(gated, of=gated.both, x=normed)
        self._add(blocks, layer.down, inner, out, parts.after_mlp, out)
        return blocks

    def _add(
        self,
        blocks: "_Blocks",
        merged: Merged,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm | None,
        out: torch.Tensor,
    ) -> None:
        """Describe the residual plus the product, normed or multiplied as the layer does."""
        if norm is None:
            product = self._product(merged, x, out)
            product.residual, product.residual_stride = residual.data_ptr(), residual.stride(0)
            product.multiplier = self._layer.parts.multiplier
            blocks.append(product, x=x, residual=residual, out=out)
            return
        product_rows = blocks.rows("product", self._hidden)
        blocks.append(self._product(merged, x, product_rows), x=x)
        normed = self._layer.norm(norm, product_rows, out, residual=residual)
        blocks.append(normed, residual=residual, out=out)

    def _norm(self, blocks: "_Blocks", norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
        """Describe a norm of rows; return where they are."""
        if norm is None:
            return x
        out = blocks.rows("normed", x.shape[1])
        blocks.append(self._layer.norm(norm, x, out), x=x)
        return out

    def _product(self, merged: Merged, x: torch.Tensor, out: torch.Tensor) -> LinearStruct:
        scratch = self._space.scratch(merged.weight.shape[1], MOST_SCRATCH_ROWS)
        return linear_struct(merged.weight, merged.bias, x, out, scratch)


class _Blocks:
    """Operations that are run block by block, over tensors of all rows and over the workspace's."""

    def __init__(self, layer: LayerOperations, space: Workspace) -> None:
        self._kernels, self._space = layer.kernels, space
        self._operations: list[Operation] = []
        self._own: list[torch.Tensor] = []
        self._moves: list[tuple[ctypes.Structure, str, int, int]] = []

    def rows(self, name: str, width: int) -> torch.Tensor:
        """Return a tensor of the workspace for the rows of a block."""
        self._own.append(self._space.many_rows(name, _BLOCK_ROWS, width))
        return self._own[-1]

    def append(
        self, operation: Operation, *, of: ctypes.Structure | None = None, **tensors: torch.Tensor
    ) -> None:
        """Add an operation; tensors by the names of its fields, or those of its part ``of``."""
        self._operations.append(operation)
        for field, tensor in tensors.items():
            if not any(tensor is own for own in self._own):
                row_bytes = tensor.stride(0) * tensor.element_size()
                self._moves.append((of or operation, field, tensor.data_ptr(), row_bytes))

    def run(self, num_rows: int) -> None:
        """Run them over T = ``num_rows`` rows."""
        operations = OperationList(self._kernels, self._operations)
        threads = torch.get_num_threads()
        for start in range(0, num_rows, _BLOCK_ROWS):
            for structure, field, address, row_bytes in self._moves:
                setattr(structure, field, address + start * row_bytes)
            operations.run(min(_BLOCK_ROWS, num_rows - start), threads)
