"""A decoder layer computed by native kernels: what transformers' module computes, in fewer steps.

Few rows (decoding) take two native calls a layer (`kv8.models.few_rows`), or one for all layers of
a chain (`kv8.models.layer_chain`). Many rows (prefill) take torch's matrix products, of merged
weights, and native operations between them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kv8.kernels.step import MOST_ROWS, gate_struct, run_one
from kv8.models.decoder_parts import Norm
from kv8.models.few_rows import FewRows, Workspace
from kv8.models.layer_chain import LayerChain
from kv8.models.layer_operations import LayerOperations, angles

_MLP_ROWS = 2048  # of an MLP at once in a prefill; bounds its memory


class FusedLayer:
    """Stands in for one decoder layer's ``forward``.

    Args:
        layer: its parts.
        workspace: shared with the model's other layers.

    Attributes:
        few: computes few rows.
    """

    def __init__(self, layer: LayerOperations, workspace: Workspace) -> None:
        self._layer = layer
        self.few = FewRows(layer, workspace)
        self._link: tuple[LayerChain, int] | None = None

    def join(self, chain: LayerChain, index: int) -> None:
        """Compute few rows as layer ``index`` of a chain."""
        self._link = (chain, index)

    def forward(self, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """Return the layer's output, [1, T, C] like ``hidden_states``.

        Raises:
            UnsupportedModelError: the model brings an attention mask of its own.
        """
        if keywords.get("attention_mask") is not None:
            raise self._layer.binding.refuse("brings an attention mask of its own")
        cos_sin = keywords["position_embeddings"] if self._layer.rotates else None
        if self._link is not None:
            chain, index = self._link
            output = chain.call(index, hidden_states, cos_sin)
            if output is not None:
                return output
        x = hidden_states[0].contiguous()
        run = self.few.run if x.shape[0] <= MOST_ROWS else self._run_many
        return run(x, cos_sin).unsqueeze(0)

    def _run_many(self, x: torch.Tensor, cos_sin: Sequence[torch.Tensor] | None) -> torch.Tensor:
        layer, parts = self._layer, self._layer.parts
        qkv = layer.qkv(self._norm(parts.before_attention, x))
        q, k, _ = layer.split(qkv)
        for norm, side in ((parts.q_norm, q), (parts.k_norm, k)):
            if norm is not None:
                run_one(layer.kernels, layer.norm(norm, side, side), len(x))
        if cos_sin is not None:
            cos, sin = (angles(table) for table in cos_sin)
            run_one(layer.kernels, layer.rotary(qkv, cos, sin), len(x))
        x = self._add(x, layer.output(layer.attend(*layer.heads(qkv))), parts.after_attention)
        if layer.gate_up is None:
            return self._add(x, layer.other_mlp(self._norm(parts.before_mlp, x)), parts.after_mlp)
        for rows in x.split(_MLP_ROWS):  # type: ignore[no-untyped-call]
            self._add_mlp(rows)
        return x

    def _add_mlp(self, x: torch.Tensor) -> None:
        """Add what the MLP makes of ``x`` [T, C] to it, in place."""
        layer, parts = self._layer, self._layer.parts
        assert layer.gate_up is not None
        assert layer.down is not None
        gate, up = layer.gate_up(self._norm(parts.before_mlp, x)).chunk(2, dim=1)
        inner = torch.empty(gate.shape, dtype=x.dtype)
        run_one(layer.kernels, gate_struct(gate, up, inner, function=parts.activation), len(x))
        del gate, up
        self._add(x, layer.down(inner), parts.after_mlp, out=x)

    def _add(
        self,
        residual: torch.Tensor,
        x: torch.Tensor,
        norm: Norm | None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``residual + x``, ``x`` normed and multiplied as the layer does."""
        x = self._norm(norm, x)
        if self._layer.parts.multiplier != 1.0:
            x = x * self._layer.parts.multiplier
        return torch.add(residual, x, out=out)

    def _norm(self, norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return x
        x = x.contiguous()
        out = torch.empty_like(x)
        run_one(self._layer.kernels, self._layer.norm(norm, x, out), len(x))
        return out
