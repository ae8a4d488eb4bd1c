"""A decoder layer computed by native kernels: what transformers' module computes, in fewer steps.

Few rows (decoding), and where there is a matrix unit many (prefill), take two native calls a layer
(`kv8.models.native_rows`), or one for all layers of a chain (`kv8.models.layer_chain`). Elsewhere
many rows go block by block through native operations and torch's products of merged weights
(`kv8.models.many_rows`).
"""

from typing import Any

import torch

from kv8.models.layer_chain import LayerChain
from kv8.models.layer_operations import LayerOperations
from kv8.models.many_rows import ManyRows
from kv8.models.native_rows import NativeRows
from kv8.models.workspace import Workspace


class FusedLayer:
    """Stands in for one decoder layer's ``forward``.

    Args:
        layer: its parts.
        workspace: shared with the model's other layers.

    Attributes:
        native: computes up to `LayerOperations.most_native` rows.
    """

    def __init__(self, layer: LayerOperations, workspace: Workspace) -> None:
        self._layer = layer
        self.native = NativeRows(layer, workspace)
        self._many = ManyRows(layer, workspace)
        self._link: tuple[LayerChain, int] | None = None

    def join(self, chain: LayerChain, index: int) -> None:
        """Compute as layer ``index`` of a chain."""
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
        path = self.native if len(x) <= self._layer.most_native else self._many
        return path.run(x, cos_sin).unsqueeze(0)
