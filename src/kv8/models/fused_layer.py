"""A decoder layer computed by native kernels: what transformers' module computes, in fewer steps.

Few rows (decoding) take two native calls a layer (`kv8.models.few_rows`), or one for all layers of
a chain (`kv8.models.layer_chain`). Many rows (prefill) go block by block through native operations,
with products of merged weights on the matrix unit (`kv8.models.unit_rows`) or by torch
(`kv8.models.many_rows`).
"""

from typing import Any

import torch

from kv8.kernels.step import MOST_ROWS, most_rows
from kv8.models.few_rows import FewRows
from kv8.models.layer_chain import LayerChain
from kv8.models.layer_operations import LayerOperations
from kv8.models.many_rows import ManyRows
from kv8.models.unit_rows import UnitRows
from kv8.models.workspace import Workspace


class FusedLayer:
    """Stands in for one decoder layer's ``forward``.

    Args:
        layer: its parts.
        workspace: shared with the model's other layers.

    Attributes:
        few: computes few rows.
        most_native: rows up to which all products are native ones.
    """

    def __init__(self, layer: LayerOperations, workspace: Workspace) -> None:
        self._layer = layer
        self.few = FewRows(layer, workspace)
        self._unit, self._many = UnitRows(layer, workspace), ManyRows(layer, workspace)
        merged = (layer.qkv, layer.output, layer.gate_up, layer.down)
        self.most_native = min(most_rows(layer.kernels, m.weight) for m in merged if m is not None)
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
        return self._path(len(x)).run(x, cos_sin).unsqueeze(0)

    def _path(self, num_rows: int) -> FewRows | UnitRows | ManyRows:
        if num_rows <= MOST_ROWS:
            return self.few
        return self._unit if num_rows <= self.most_native else self._many
