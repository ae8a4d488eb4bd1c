"""A decoder layer over many rows, as in prefill: torch's products, native operations between them.

What is not attention goes through the layer block by block, in memory that all layers use again
and again: it stays in the CPU's cache, and the system need not hand out fresh pages for it.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from kv8.kernels.step import gate_struct, run_one
from kv8.models.decoder_parts import Norm
from kv8.models.layer_operations import LayerOperations
from kv8.models.workspace import Workspace

# Torch repacks a weight for each product: too few rows and that costs more than the product. With
# more, what one operation writes has left the cache before the next one reads it. Measured.
BLOCK_ROWS: Final = 2048


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
        for rows in _blocks(len(x)):
            self._project(x[rows], angles and [table[rows] for table in angles], qkv[rows])
        mixed = layer.attend(*layer.heads(qkv))
        out = torch.empty_like(x)
        for rows in _blocks(len(x)):
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
        product = self._scratch("product", len(x), self._hidden)
        layer.output.multiply(mixed, product)
        self._add(x, product, parts.after_attention, out)
        normed = self._norm(parts.before_mlp, out)
        if layer.gate_up is None or layer.down is None:
            return self._add(out, layer.other_mlp(normed), parts.after_mlp, out)
        both = self._scratch("gate and up", len(x), layer.gate_up.weight.shape[0])
        layer.gate_up.multiply(normed, both)
        gate, up = both.chunk(2, dim=1)
        inner = self._scratch("inner", len(x), gate.shape[1])
        run_one(layer.kernels, gate_struct(gate, up, inner, function=parts.activation), len(x))
        layer.down.multiply(inner, product)
        return self._add(out, product, parts.after_mlp, out)

    def _add(
        self, residual: torch.Tensor, x: torch.Tensor, norm: Norm | None, out: torch.Tensor
    ) -> None:
        """Write ``residual + x``, ``x`` normed and multiplied as the layer does."""
        x = self._norm(norm, x)
        if self._layer.parts.multiplier != 1.0:
            x = x * self._layer.parts.multiplier
        torch.add(residual, x, out=out)

    def _norm(self, norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return x
        x = x.contiguous()
        out = self._scratch("normed", len(x), x.shape[1])
        run_one(self._layer.kernels, self._layer.norm(norm, x, out), len(x))
        return out

    def _scratch(self, name: str, num_rows: int, width: int) -> torch.Tensor:
        return self._space.many_rows(name, num_rows, width)


def _blocks(num_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, num_rows))
