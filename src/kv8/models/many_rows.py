"""A decoder layer over many rows, as in prefill: native operations, torch's products if faster.

What is not attention goes through the layer block by block, in memory that all layers use again
and again: it stays in the CPU's cache, and the system need not hand out fresh pages for it.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from kv8.kernels.step import (
    GatedStruct,
    LinearStruct,
    gate_struct,
    linear_struct,
    most_rows,
    run_one,
)
from kv8.models.decoder_parts import Norm
from kv8.models.layer_operations import LayerOperations
from kv8.models.merged_weights import Merged
from kv8.models.workspace import Workspace

# Rows that go through a layer together. On a matrix unit: as many as the cache holds beside what is
# computed from them. For torch, which repacks a weight with each product: enough to make that up.
_UNIT_ROWS: Final = 512
_TORCH_ROWS: Final = 2048


class ManyRows:
    """Computes one layer over any number of rows.

    Args:
        layer: its parts.
        space: shared with the model's other layers.

    Attributes:
        most_native: rows up to which the products are native ones.
    """

    def __init__(self, layer: LayerOperations, space: Workspace) -> None:
        self._layer, self._space = layer, space
        self._hidden = layer.output.weight.shape[0]
        merged = (layer.qkv, layer.output, layer.gate_up, layer.down)
        self.most_native = min(most_rows(layer.kernels, m.weight) for m in merged if m is not None)
        self._native = False  # whether the rows at hand are multiplied on it

    def run(self, x: torch.Tensor, cos_sin: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """Return the layer's output [T, C] for ``x`` [T, C], contiguous.

        ``cos_sin`` are the angles' cosines and sines, if the layer rotates.
        """
        layer = self._layer
        self._native = len(x) <= self.most_native
        qkv = self._space.many_rows("qkv", len(x), layer.qkv.weight.shape[0])
        angles = None if cos_sin is None else self._space.angles(cos_sin)
        for rows in self._blocks(len(x)):
            self._project(x[rows], angles and [table[rows] for table in angles], qkv[rows])
        mixed = layer.attend(*layer.heads(qkv))
        out = torch.empty_like(x)
        for rows in self._blocks(len(x)):
            self._finish(x[rows], mixed[rows], out[rows])
        return out

    def _project(
        self, x: torch.Tensor, angles: Sequence[torch.Tensor] | None, qkv: torch.Tensor
    ) -> None:
        """Write queries and keys, normed and rotated, and values."""
        layer, parts = self._layer, self._layer.parts
        self._multiply(layer.qkv, self._norm(parts.before_attention, x), qkv)
        q, k, _ = layer.split(qkv)
        for norm, side in ((parts.q_norm, q), (parts.k_norm, k)):
            if norm is not None:
                run_one(layer.kernels, layer.norm(norm, side, side), len(x))
        if angles is not None:
            run_one(layer.kernels, layer.rotary(qkv, *angles), len(x))

    def _finish(self, x: torch.Tensor, mixed: torch.Tensor, out: torch.Tensor) -> None:
        """Write the residual ``x`` with what attention and the MLP add to it."""
        layer, parts = self._layer, self._layer.parts
        self._add(layer.output, mixed, x, parts.after_attention, out)
        normed = self._norm(parts.before_mlp, out)
        if layer.gate_up is None or layer.down is None:
            return self._join(layer.other_mlp(normed), out, parts.after_mlp, out)
        both = self._rows("gate and up", len(x), layer.gate_up.weight.shape[0])
        gate, up = both.chunk(2, dim=1)
        inner = self._rows("inner", len(x), gate.shape[1])
        gating = gate_struct(gate, up, inner, function=parts.activation)
        if self._native:
            product = self._product(layer.gate_up, normed, both)
            run_one(layer.kernels, GatedStruct(product, gating), len(x))
        else:
            self._multiply(layer.gate_up, normed, both)
            run_one(layer.kernels, gating, len(x))
        return self._add(layer.down, inner, out, parts.after_mlp, out)

    def _add(
        self,
        merged: Merged,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm | None,
        out: torch.Tensor,
    ) -> None:
        """Write the residual plus the product, normed and multiplied as the layer does."""
        if self._native and norm is None:
            return self._multiply(merged, x, out, residual)
        product = self._rows("product", len(x), self._hidden)
        self._multiply(merged, x, product)
        return self._join(product, residual, norm, out)

    def _join(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm | None, out: torch.Tensor
    ) -> None:
        x = self._norm(norm, x)
        if self._layer.parts.multiplier != 1.0:
            x = x * self._layer.parts.multiplier
        torch.add(residual, x, out=out)

    def _multiply(
        self,
        merged: Merged,
        x: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Write the product; with a residual, which only native products take, the sum."""
        if self._native:
            return run_one(self._layer.kernels, self._product(merged, x, out, residual), len(x))
        assert residual is None
        return merged.multiply(x, out)

    def _product(
        self,
        merged: Merged,
        x: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> LinearStruct:
        return linear_struct(
            merged.weight,
            merged.bias,
            x,
            out,
            self._space.scratch(merged.weight.shape[1], _UNIT_ROWS),
            residual=residual,
            multiplier=self._layer.parts.multiplier,
        )

    def _norm(self, norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return x
        x = x.contiguous()
        out = self._rows("normed", len(x), x.shape[1])
        run_one(self._layer.kernels, self._layer.norm(norm, x, out), len(x))
        return out

    def _rows(self, name: str, num_rows: int, width: int) -> torch.Tensor:
        return self._space.many_rows(name, num_rows, width)

    def _blocks(self, num_rows: int) -> Iterator[slice]:
        most = _UNIT_ROWS if self._native else _TORCH_ROWS
        for start in range(0, num_rows, most):
            yield slice(start, min(start + most, num_rows))
