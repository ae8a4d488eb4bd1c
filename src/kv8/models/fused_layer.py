"""A decoder layer computed by native kernels: what transformers' module computes, in fewer steps.

Few rows (decoding) take two native calls a layer, one before attention and one after. Many rows
(prefill) take torch's matrix products and native operations between them. Letters as in
docs/architecture.md, C for the hidden size, I for the MLP's, Q for all heads' queries, keys and
values, one after another.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kv8.attention.backend import AttentionCall
from kv8.kernels.cpu import FORMAT_NUMBERS, CpuKernels
from kv8.kernels.step import (
    LinearStruct,
    Operation,
    OperationList,
    gate_struct,
    linear_struct,
    most_rows,
    norm_struct,
    rotary_struct,
    run_one,
    scratch_size,
)
from kv8.models.decoder_parts import DecoderParts, Norm
from kv8.models.interface import LayerBinding, store_and_attend
from kv8.models.merged_weights import Merged

_MLP_ROWS = 2048  # rows of an MLP at once in a prefill; bounds its memory


class Workspace:
    """Memory the layers of one model share while they compute few rows.

    Args:
        kernels: the native operations.
        dtype: of the model.

    Attributes:
        most_rows: how many rows are few.
    """

    def __init__(self, kernels: CpuKernels, dtype: torch.dtype) -> None:
        self.most_rows = most_rows(kernels)
        self._dtype = dtype
        self._rows: dict[tuple[str, int], torch.Tensor] = {}

    def rows(self, name: str, width: int) -> torch.Tensor:
        """Return a tensor [most_rows, width], the same for the same name and width."""
        key = (name, width)
        if key not in self._rows:
            self._rows[key] = torch.zeros(self.most_rows, width, dtype=self._dtype)
        return self._rows[key]

    def scratch(self, num_inputs: int) -> torch.Tensor:
        """Return what a product of ``num_inputs`` wide rows needs besides."""
        key = ("scratch", num_inputs)
        if key not in self._rows:
            size = scratch_size(self.most_rows, num_inputs)
            self._rows[key] = torch.zeros(size, dtype=torch.float32)
        return self._rows[key]


class FusedLayer:
    """Stands in for one decoder layer's ``forward``.

    Args:
        parts: of the layer.
        binding: of its attention module.
        call: what its attention asks for; it must not bring sinks.
        rotates: whether queries and keys get the rotary embedding.
        kernels: the native operations.
        workspace: shared with the model's other layers.
    """

    def __init__(
        self,
        parts: DecoderParts,
        binding: LayerBinding,
        call: AttentionCall,
        *,
        rotates: bool,
        kernels: CpuKernels,
        workspace: Workspace,
    ) -> None:
        self._parts, self._binding, self._call = parts, binding, call
        self._kernels, self._space, self._rotates = kernels, workspace, rotates
        self._qkv = Merged(parts.qkv)
        self._output = Merged((parts.output,))
        self._gate_up = Merged(parts.gate_up) if parts.gate_up else None
        self._down = Merged((parts.down,)) if parts.down is not None else None
        geometry = binding.geometry
        self._heads = (geometry.num_heads, geometry.num_kv_heads)
        self._head_dim = geometry.head_dim
        self._few = _FewRows(self)

    def forward(self, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """Return the layer's output, [1, T, C] like ``hidden_states``."""
        if keywords.get("attention_mask") is not None:
            raise self._binding.refuse("brings an attention mask of its own")
        cos_sin = keywords["position_embeddings"] if self._rotates else None
        x = hidden_states[0].contiguous()
        run = self._few.run if x.shape[0] <= self._space.most_rows else self._run_many
        return run(x, cos_sin).unsqueeze(0)

    def _run_many(
        self, x: torch.Tensor, cos_sin: Sequence[torch.Tensor] | None
    ) -> torch.Tensor:
        parts = self._parts
        qkv = self._qkv(self._norm(parts.before_attention, x))
        q, k, v = self.split(qkv)
        for norm, side in ((parts.q_norm, q), (parts.k_norm, k)):
            if norm is not None:
                run_one(self._kernels, self.norm(norm, side, side), len(x))
        if cos_sin is not None:
            cos, sin = (rotary_row(table) for table in cos_sin)
            run_one(self._kernels, self.rotary(qkv, cos, sin), len(x))
        mixed = self.attend(q, k, v)
        x = self._add(x, self._output(mixed), parts.after_attention)
        if self._gate_up is None:
            return self._add(x, self.other_mlp(self._norm(parts.before_mlp, x)), parts.after_mlp)
        return torch.cat([self._mlp_of(rows) for rows in x.split(_MLP_ROWS)])

    def _mlp_of(self, x: torch.Tensor) -> torch.Tensor:
        assert self._gate_up is not None
        assert self._down is not None
        both = self._gate_up(self._norm(self._parts.before_mlp, x))
        gate, up = both.chunk(2, dim=1)
        inner = torch.empty(gate.shape, dtype=x.dtype)
        function = self._parts.activation
        run_one(self._kernels, gate_struct(gate, up, inner, function=function), len(x))
        return self._add(x, self._down(inner), self._parts.after_mlp)

    def _add(self, residual: torch.Tensor, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Return ``residual + x``, ``x`` normed and multiplied as the layer does."""
        x = self._norm(norm, x)
        if self._parts.multiplier != 1.0:
            x = x * self._parts.multiplier
        return residual + x

    def _norm(self, norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return x
        out = torch.empty_like(x)
        run_one(self._kernels, self.norm(norm, x, out), len(x))
        return out

    def norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
    ) -> Operation:
        """Describe a norm of rows, or of their heads if its weight is no longer than a head."""
        weight: Any = norm.module.weight
        return norm_struct(
            weight,
            x,
            out,
            num_heads=x.shape[1] // len(weight),
            epsilon=norm.epsilon,
            order=norm.order,
            residual=residual,
        )

    def rotary(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Operation:
        """Describe the rotary embedding of queries and keys, which lie side by side."""
        heads = sum(self._heads)
        return rotary_struct(qkv[:, : heads * self._head_dim], cos, sin, num_heads=heads)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of queries [T, H * D], keys and values [T, K * D]."""
        queries, keys = (heads * self._head_dim for heads in self._heads)
        return (
            qkv[:, :queries],
            qkv[:, queries : queries + keys],
            qkv[:, queries + keys : queries + 2 * keys],
        )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v, attend with q; return [T, H * D]."""
        q, k, v = (side.unflatten(1, (-1, self._head_dim)) for side in (q, k, v))
        return store_and_attend(self._binding, q, k, v, self._call).flatten(1)

    def other_mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer's own module makes of normed rows [T, C]."""
        output = self._parts.mlp(x.unsqueeze(0))
        assert torch.is_tensor(output), "an MLP that returns more than its output is not fused"
        return output[0]


class _FewRows:
    """The layer over few rows: everything but attention in two native calls.

    Structures are filled once; with each call only the tensors change that others hold.
    """

    def __init__(self, layer: FusedLayer) -> None:
        self._layer, self._parts = layer, layer._parts
        space = layer._space
        self._hidden = layer._output.weight.shape[0]
        self._qkv = space.rows("qkv", layer._qkv.weight.shape[0])
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._readers: list[tuple[Operation, str]] = []  # of x, the layer's input
        self._before = OperationList(layer._kernels, self._list_before())
        self._attended: list[LinearStruct] = []
        self._writers: list[Operation] = []  # of the layer's output
        self._after = OperationList(layer._kernels, self._list_after())

    def _list_before(self) -> list[Operation]:
        layer, parts, space = self._layer, self._parts, self._layer._space
        operations: list[Operation] = []
        x = space.rows("normed", self._hidden)
        if parts.before_attention is not None:
            operations.append(layer.norm(parts.before_attention, x, x))
        operations.append(self._linear(layer._qkv, x, self._qkv))
        self._readers.append((operations[0], "x"))
        q, k, _ = layer.split(self._qkv)
        for norm, side in ((parts.q_norm, q), (parts.k_norm, k)):
            if norm is not None:
                operations.append(layer.norm(norm, side, side))
        self._rotary = None
        if layer._rotates:
            no_angles = torch.zeros(1, layer._head_dim, dtype=x.dtype)
            self._rotary = layer.rotary(self._qkv, no_angles, no_angles)
            operations.append(self._rotary)
        return operations

    def _list_after(self) -> list[Operation]:
        layer, parts, space = self._layer, self._parts, self._layer._space
        queries = layer._output.weight.shape[1]
        mixed, middle = space.rows("mixed", queries), space.rows("middle", self._hidden)
        operations = self._added(layer._output, mixed, middle, middle, parts.after_attention)
        self._attended.append(operations[0])  # type: ignore[arg-type]
        self._readers.append((operations[-1], "residual"))
        normed = middle
        if parts.before_mlp is not None:
            normed = space.rows("normed", self._hidden)
            operations.append(layer.norm(parts.before_mlp, middle, normed))
        self._normed, self._middle = normed, middle
        if layer._gate_up is None or layer._down is None:
            return operations
        both = space.rows("gate and up", layer._gate_up.weight.shape[0])
        gate, up = both.chunk(2, dim=1)
        inner = space.rows("inner", gate.shape[1])
        operations.append(self._linear(layer._gate_up, normed, both))
        operations.append(gate_struct(gate, up, inner, function=parts.activation))
        operations += self._added(layer._down, inner, middle, middle, parts.after_mlp)
        self._writers.append(operations[-1])
        return operations

    def _linear(self, merged: Merged, x: torch.Tensor, out: torch.Tensor) -> LinearStruct:
        scratch = self._layer._space.scratch(merged.weight.shape[1])
        return linear_struct(merged.weight, merged.bias, x, out, scratch)

    def _added(
        self,
        merged: Merged,
        x: torch.Tensor,
        residual: torch.Tensor,
        out: torch.Tensor,
        norm: Norm | None,
    ) -> list[Operation]:
        """Describe ``residual + merged(x)``, the product normed or multiplied if the layer does."""
        layer = self._layer
        scratch = layer._space.scratch(merged.weight.shape[1])
        if norm is None:
            return [
                linear_struct(
                    merged.weight,
                    merged.bias,
                    x,
                    out,
                    scratch,
                    residual=residual,
                    multiplier=self._parts.multiplier,
                )
            ]
        product = layer._space.rows("product", self._hidden)
        return [
            linear_struct(merged.weight, merged.bias, x, product, scratch),
            layer.norm(norm, product, out, residual=residual),
        ]

    def run(self, x: torch.Tensor, cos_sin: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """Return the layer's output for ``x`` [T, C]."""
        layer, num_rows, threads = self._layer, x.shape[0], torch.get_num_threads()
        address, stride = x.data_ptr(), x.stride(0)
        for operation, name in self._readers:
            setattr(operation, name, address)
            setattr(operation, f"{name}_stride", stride)
        if self._rotary is not None:
            assert cos_sin is not None
            cos, sin = (rotary_row(table) for table in cos_sin)
            rotary = self._rotary
            rotary.cos, rotary.sin, rotary.rotary = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
            rotary.angle_dtype = FORMAT_NUMBERS[cos.dtype]
        self._before.run(num_rows, threads)
        mixed = store_and_attend(layer._binding, *self._heads(num_rows), layer._call)
        [attended] = self._attended
        attended.x, attended.x_stride = mixed.data_ptr(), mixed.stride(0)
        if not self._writers:
            self._after.run(num_rows, threads)
            added = layer.other_mlp(self._normed[:num_rows].clone())
            return layer._add(self._middle[:num_rows].clone(), added, self._parts.after_mlp)
        out = torch.empty(num_rows, self._hidden, dtype=x.dtype)
        [last] = self._writers
        last.out = out.data_ptr()
        self._after.run(num_rows, threads)
        return out

    def _heads(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [T, H, D], k and v [T, K, D] as views of the workspace."""
        views = self._views.get(num_rows)
        if views is None:
            size = self._layer._head_dim
            q, k, v = (
                side.unflatten(1, (-1, size)) for side in self._layer.split(self._qkv[:num_rows])
            )
            views = self._views[num_rows] = (q, k, v)
        return views


def rotary_row(table: torch.Tensor) -> torch.Tensor:
    """Return cosines or sines as [T, rotary], contiguous."""
    return table.reshape(-1, table.shape[-1]).contiguous()

