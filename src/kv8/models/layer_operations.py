"""What a fused decoder layer is made of: merged weights, and native operations described for them.

Letters as in docs/architecture.md, and Q for all heads' queries, keys and values side by side.
"""

import torch

from kv8.attention.backend import AttentionCall
from kv8.kernels.cpu import CpuKernels
from kv8.kernels.step import most_rows, norm_struct, rotary_struct
from kv8.kernels.step_structs import NormStruct, RotaryStruct
from kv8.models.decoder_parts import DecoderParts, Norm
from kv8.models.interface import LayerBinding, store_and_attend
from kv8.models.merged_weights import Merged
from kv8.models.weight_memory import WeightMemory


class LayerOperations:
    """One layer's parts, ready to be computed.

    Args:
        parts: of the layer; their weights are merged now.
        binding: of its attention module.
        call: what its attention asks for; it must not bring sinks.
        rotates: whether queries and keys get the rotary embedding.
        kernels: the native operations.
        memory: where the weights go; see `Merged`.

    Attributes:
        qkv, output: projections before and after attention.
        gate_up, down: projections of the MLP, `None` if it is of another kind.
        most_native: rows up to which native operations are the fast way for all of them.
    """

    def __init__(
        self,
        parts: DecoderParts,
        binding: LayerBinding,
        call: AttentionCall,
        *,
        rotates: bool,
        kernels: CpuKernels,
        memory: WeightMemory | None = None,
    ) -> None:
        assert call.sinks is None, "sinks are weights: a call made once would keep old ones"
        self.parts, self.binding, self.call = parts, binding, call
        self.rotates, self.kernels = rotates, kernels
        self.qkv, self.output = Merged(parts.qkv, memory), Merged((parts.output,), memory)
        self.gate_up = Merged(parts.gate_up, memory) if parts.gate_up else None
        self.down = Merged((parts.down,), memory) if parts.down is not None else None
        products = (self.qkv, self.output, self.gate_up, self.down)
        self.most_native = min(most_rows(kernels, p.weight) for p in products if p is not None)
        geometry = binding.geometry
        self.head_dim = geometry.head_dim
        self._heads = (geometry.num_heads, geometry.num_kv_heads)

    def norm(
        self,
        norm: Norm,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
    ) -> NormStruct:
        """Describe a norm of rows, or of their heads if its weight is no longer than a head."""
        weight = norm.weight
        return norm_struct(
            weight,
            x,
            out,
            num_heads=x.shape[1] // weight.shape[0],
            epsilon=norm.epsilon,
            order=norm.order,
            residual=residual,
        )

    def rotary(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> RotaryStruct:
        """Describe the rotary embedding of queries and keys in ``qkv`` [T, Q]; see `angles`."""
        heads = sum(self._heads)
        return rotary_struct(qkv[:, : heads * self.head_dim], cos, sin, num_heads=heads)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of queries [T, H * D], keys and values [T, K * D]."""
        queries, keys = (heads * self.head_dim for heads in self._heads)
        return (
            qkv[:, :queries],
            qkv[:, queries : queries + keys],
            qkv[:, queries + keys : queries + 2 * keys],
        )

    def heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return views of queries [T, H, D], keys and values [T, K, D]."""
        q, k, v = (side.view(len(side), -1, self.head_dim) for side in self.split(qkv))
        return q, k, v

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v, attend with q (shapes as `heads` gives them); return [T, H * D]."""
        return store_and_attend(self.binding, q, k, v, self.call).flatten(1)

    def add_other_mlp(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``residual`` [T, C] plus what the layer adds of `other_mlp` of ``x``."""
        added = self.other_mlp(x).contiguous()
        if self.parts.after_mlp is not None:
            added = self.parts.after_mlp.module(added)
        if self.parts.multiplier != 1.0:
            added = added * self.parts.multiplier
        return residual + added

    def other_mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer's own MLP makes of normed rows [T, C]."""
        output: torch.Tensor = self.parts.mlp(x.unsqueeze(0))
        return output[0]


def angles(table: torch.Tensor) -> torch.Tensor:
    """Return cosines or sines [1, T, rotary] as [T, rotary], contiguous."""
    return table.reshape(-1, table.shape[-1]).contiguous()
