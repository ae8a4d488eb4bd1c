"""A decoder layer by native operations only: everything but attention in two calls.

Without a matrix unit that is for few rows, as in decoding (`LayerOperations.most_native`).
"""

from collections.abc import Sequence

import torch

from kv8.attention.cpu import NativeAttention
from kv8.kernels.cpu import FORMAT_NUMBERS
from kv8.kernels.step import OperationList, gate_struct, linear_struct
from kv8.kernels.step_structs import (
    GatedStruct,
    LinearStruct,
    NormStruct,
    Operation,
    RotaryStruct,
)
from kv8.models.decoder_parts import Norm
from kv8.models.interface import LayerBinding
from kv8.models.layer_operations import LayerOperations
from kv8.models.merged_weights import Merged
from kv8.models.workspace import Workspace


class NativeRows:
    """Computes one layer.

    The operations are described over the workspace, anew when it grows; with each call only the
    addresses of tensors change that others hold. Weights are described by address too: they may be
    written to, not exchanged.
    """

    def __init__(self, layer: LayerOperations, space: Workspace) -> None:
        self._layer, self.space = layer, space
        self._hidden = layer.output.weight.shape[0]
        self._describe()

    def _describe(self) -> None:
        layer = self._layer
        self._kept: list[torch.Tensor] = []  # of the workspace: operations know only addresses
        self._qkv = self._rows("qkv", layer.qkv.weight.shape[0])
        self._middle = self._rows("middle", self._hidden)  # between attention and MLP
        self._normed = self._rows("normed", self._hidden)
        self._mixed = self._rows("mixed", layer.output.weight.shape[1])
        before = self._describe_before()
        self._first = before[0]
        self._rotary = before[-1] if isinstance(before[-1], RotaryStruct) else None
        joined, after = self._describe_joining(), self._describe_mlp()
        self._attended, self._joined = joined[0], joined[-1]
        self._last = after[-1] if layer.down is not None else None
        self._before = OperationList(layer.kernels, before)
        self._after = OperationList(layer.kernels, [*joined, *after])
        self._capacity = self.space.capacity  # last: what failed is described again

    def reserve(self, num_rows: int) -> None:
        """Have room for so many rows."""
        self.space.reserve(num_rows)
        if self._capacity != self.space.capacity:
            self._describe()

    def run(self, x: torch.Tensor, cos_sin: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """Return the layer's output [T, C] for ``x`` [T, C], contiguous.

        ``cos_sin`` are the angles' cosines and sines, if the layer rotates.
        """
        layer, num_rows, threads = self._layer, x.shape[0], torch.get_num_threads()
        self.reserve(num_rows)
        out = torch.empty_like(x)
        self.place(x.data_ptr(), out.data_ptr(), cos_sin)
        self._before.run(num_rows, threads)
        mixed = layer.attend(*layer.heads(self._qkv[:num_rows]))
        self._attended.x = mixed.data_ptr()
        self._after.run(num_rows, threads)
        return out if self.whole else self._with_other_mlp(num_rows)

    @property
    def whole(self) -> bool:
        """Whether the operations compute all of the layer, the MLP included."""
        return self._last is not None

    def place(self, x: int, out: int, cos_sin: Sequence[torch.Tensor] | None) -> None:
        """Let the operations read the layer's input and write its output at these addresses."""
        self._first.x = self._joined.residual = x
        if self._last is not None:
            self._last.out = out
        if self._rotary is not None and cos_sin is not None:
            cos, sin = self.space.angles(cos_sin)
            self._rotary.cos, self._rotary.sin = cos.data_ptr(), sin.data_ptr()
            self._rotary.rotary = cos.shape[1]
            self._rotary.angle_dtype = FORMAT_NUMBERS[cos.dtype]

    def describe_attention(self) -> NativeAttention:
        """Describe attention over the workspace; `read_attention` lets the layer go on from it."""
        layer, mixed = self._layer, self._mixed
        output = mixed.view(len(mixed), -1, layer.head_dim)
        return NativeAttention(*layer.heads(self._qkv), output, layer.call)

    def read_attention(self) -> None:
        """Let the operations read what `describe_attention` describes."""
        self._attended.x = self._mixed.data_ptr()

    @property
    def operations(self) -> tuple[Sequence[Operation], Sequence[Operation]]:
        """What comes before attention, and what comes after it."""
        return self._before.operations, self._after.operations

    @property
    def most_rows(self) -> int:
        """Rows up to which native operations are the fast way."""
        return self._layer.most_native

    @property
    def binding(self) -> LayerBinding:
        """Of the layer's attention."""
        return self._layer.binding

    def _with_other_mlp(self, num_rows: int) -> torch.Tensor:
        normed = self._normed if self._layer.parts.before_mlp is not None else self._middle
        return self._layer.add_other_mlp(self._middle[:num_rows], normed[:num_rows].clone())

    def _rows(self, name: str, width: int) -> torch.Tensor:
        self._kept.append(self.space.rows(name, width))
        return self._kept[-1]

    def _describe_before(self) -> list[Operation]:
        layer, parts, normed = self._layer, self._layer.parts, self._normed
        operations: list[Operation] = []
        if parts.before_attention is not None:
            operations.append(layer.norm(parts.before_attention, normed, normed))
        operations.append(self._product(layer.qkv, normed, self._qkv))
        q, k, _ = layer.split(self._qkv)
        for norm, side in ((parts.q_norm, q), (parts.k_norm, k)):
            if norm is not None:
                operations.append(layer.norm(norm, side, side))
        if layer.rotates:
            none = torch.zeros(1, layer.head_dim, dtype=normed.dtype)  # replaced with each call
            operations.append(layer.rotary(self._qkv, none, none))
        return operations

    def _describe_joining(self) -> list[LinearStruct | NormStruct]:
        """Describe what makes the residual after attention."""
        layer, parts = self._layer, self._layer.parts
        return self._add(layer.output, self._mixed, parts.after_attention)

    def _describe_mlp(self) -> list[Operation]:
        layer, parts = self._layer, self._layer.parts
        operations: list[Operation] = []
        normed = self._middle
        if parts.before_mlp is not None:
            normed = self._normed
            operations.append(layer.norm(parts.before_mlp, self._middle, normed))
        if layer.gate_up is None or layer.down is None:
            return operations
        both = self._rows("gate and up", layer.gate_up.weight.shape[0])
        gate, up = both.chunk(2, dim=1)
        inner = self._rows("inner", gate.shape[1])
        gating = gate_struct(gate, up, inner, function=parts.activation)
        operations.append(GatedStruct(self._product(layer.gate_up, normed, both), gating))
        operations += self._add(layer.down, inner, parts.after_mlp)
        return operations

    def _product(self, merged: Merged, x: torch.Tensor, out: torch.Tensor) -> LinearStruct:
        scratch = self.space.scratch(merged.weight.shape[1], self.space.capacity)
        self._kept.append(scratch)
        return linear_struct(merged.weight, merged.bias, x, out, scratch)

    def _add(
        self, merged: Merged, x: torch.Tensor, norm: Norm | None
    ) -> list[LinearStruct | NormStruct]:
        """Describe how the product, normed or multiplied if the layer does, is added to the
        residual in ``middle``; the last operation can add to another, or write elsewhere.
        """
        middle = self._middle
        if norm is None:
            product = self._product(merged, x, middle)
            product.residual, product.residual_stride = middle.data_ptr(), middle.stride(0)
            product.multiplier = self._layer.parts.multiplier
            return [product]
        product_rows = self._rows("product", self._hidden)
        return [
            self._product(merged, x, product_rows),
            self._layer.norm(norm, product_rows, middle, residual=middle),
        ]
