"""A decoder layer on a GPU in a third of the launches: what lies between its products is fused.

In decoding, the many small operations of a layer (a norm alone is six) take as long as its products
do. Products are torch's own, one for q, k and v and one for gate and up
(`kv8.models.joined_weights`).
"""

from typing import Any

import torch
from torch.nn.functional import linear

from kv8.attention.backend import AttentionCall
from kv8.kernels.triton_layer import add_and_norm, gated, norm_rows, rotate
from kv8.models.decoder_parts import DecoderParts, Norm
from kv8.models.interface import LayerBinding, store_and_attend
from kv8.models.joined_weights import JoinedLinears
from kv8.models.layer_operations import angles


class FusedGpuLayer:
    """Stands in for one decoder layer's ``forward``.

    Args:
        parts: of the layer.
        binding: of its attention module.
        call: what its attention asks for; it must not bring sinks.
        rotates: whether queries and keys get the rotary embedding.
    """

    def __init__(
        self, parts: DecoderParts, binding: LayerBinding, call: AttentionCall, *, rotates: bool
    ) -> None:
        assert call.sinks is None, "sinks are weights: a call made once would keep old ones"
        self._parts, self._binding, self._call, self._rotates = parts, binding, call, rotates
        self._qkv = JoinedLinears(parts.qkv)
        self._gate_up = JoinedLinears(parts.gate_up) if parts.gate_up else None

    def forward(self, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """Return the layer's output, [1, T, C] like ``hidden_states``.

        Raises:
            UnsupportedModelError: the model brings an attention mask of its own.
        """
        if keywords.get("attention_mask") is not None:
            raise self._binding.refuse("brings an attention mask of its own")
        parts, x = self._parts, hidden_states[0].contiguous()
        mixed = self._attend(_norm(parts.before_attention, x), keywords)
        mixed = _norm(parts.after_attention, linear(mixed, parts.output.weight, parts.output.bias))
        norm = parts.before_mlp
        if norm is None:
            x = normed = self._add(mixed, x)
        else:
            x, normed = add_and_norm(
                mixed, x, norm.weight, norm.epsilon, norm.order, parts.multiplier
            )
        return self._add(_norm(parts.after_mlp, self._mlp(normed)), x).unsqueeze(0)

    def _attend(self, x: torch.Tensor, keywords: dict[str, Any]) -> torch.Tensor:
        """Return attention [T, H * D] of normed rows [T, C]."""
        parts, geometry = self._parts, self._binding.geometry
        sizes = [n * geometry.head_dim for n in (geometry.num_heads, *[geometry.num_kv_heads] * 2)]
        embeddings = keywords["position_embeddings"] if self._rotates else ()
        tables = [angles(table) for table in embeddings]
        if self._qkv.is_one and parts.q_norm is None and parts.k_norm is None:
            qk, v = self._qkv(x, [sizes[0] + sizes[1], sizes[2]])  # are rotated at once
            if tables:
                rotate(qk, geometry.head_dim, *tables)
            q, k = torch.split_with_sizes(qk, sizes[:2], dim=1)
        else:
            q, k, v = self._qkv(x, sizes)
            q, k = _norm(parts.q_norm, q), _norm(parts.k_norm, k)
            for side in (q, k) if tables else ():
                rotate(side, geometry.head_dim, *tables)
        q, k, v = (side.view(len(side), -1, geometry.head_dim) for side in (q, k, v))
        return store_and_attend(self._binding, q, k, v, self._call).flatten(1)

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._parts
        if parts.down is None or self._gate_up is None:
            output: torch.Tensor = parts.mlp(x.unsqueeze(0))
            return output[0]
        size = parts.down.in_features
        gate, up = self._gate_up(x, [size, size])
        return linear(gated(gate, up, parts.activation), parts.down.weight, parts.down.bias)

    def _add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        multiplier = self._parts.multiplier
        return residual + (x if multiplier == 1.0 else x * multiplier)


class FusedGpuNorm:
    """Stands in for a root mean square norm's ``forward``."""

    def __init__(self, norm: Norm) -> None:
        self._norm = norm
        self._original = type(norm.module).forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [..., D], normed."""
        if x.dtype != self._norm.weight.dtype or x.numel() == 0:
            output: torch.Tensor = self._original(self._norm.module, x)
            return output
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        normed = norm_rows(rows, self._norm.weight, self._norm.epsilon, self._norm.order)
        return normed.view(x.shape)


def _norm(norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm_rows(x, norm.weight, norm.epsilon, norm.order)
