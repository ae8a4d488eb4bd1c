"""A decoder layer over many rows, as in prefill, where torch's products are the faster ones.

What is not attention goes through the layer block by block, in memory that all layers use again
and again, so that the system need not hand out fresh pages for it. torch repacks a weight with each
product: blocks are large enough to make that up.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from kv8.kernels.step import gate_struct, run_one
from kv8.models.decoder_parts import Norm
from kv8.models.layer_operations import LayerOperations
from kv8.models.merged_weights import Merged
from kv8.models.workspace import Workspace

_BLOCK_ROWS: Final = 2048  # that go through a layer together


class ManyRows:
    """Computes one layer over any number of rows.

    Args:
        layer: its parts.
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
        layer.qkv.multiply(self._norm(parts.before_attention, x), qkv)
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
        layer.gate_up.multiply(normed, both)
        run_one(layer.kernels, gate_struct(gate, up, inner, function=parts.activation), len(x))
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
        product = self._rows("product", len(x), self._hidden)
        merged.multiply(x, product)
        return self._join(product, residual, norm, out)

    def _join(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm | None, out: torch.Tensor
    ) -> None:
        x = self._norm(norm, x)
        if self._layer.parts.multiplier != 1.0:
            x = x * self._layer.parts.multiplier
        torch.add(residual, x, out=out)

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
        for start in range(0, num_rows, _BLOCK_ROWS):
            yield slice(start, min(start + _BLOCK_ROWS, num_rows))
