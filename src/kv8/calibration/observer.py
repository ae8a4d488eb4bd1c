"""An attention backend that notes what passes through it and changes nothing."""

from collections.abc import Sequence

import torch

from kv8.attention.backend import AttentionBackend, AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerAttention
from kv8.calibration.observations import Observations, Part
from kv8.scales.scale import Side


class ObservingBackend:
    """Wraps the backend that computes; every key, value and query goes through here.

    Args:
        backend: what stores and attends.
        observations: where to note what is stored and asked.

    Attributes:
        part: the part of the data the next steps belong to.
        samples: numbers of the samples of the next step, in the batch's order.
    """

    def __init__(self, backend: AttentionBackend, observations: Observations) -> None:
        self._backend = backend
        self.observations = observations
        self.name = backend.name
        self.capturable = False  # what is observed is looked at on the host
        self.part: Part = "first"
        self.samples: Sequence[int] = ()

    def refuses(self, layer: LayerAttention) -> str | None:
        """Return why the wrapped backend cannot serve ``layer``, or `None` if it can."""
        return self._backend.refuses(layer)

    def store(
        self, layer: LayerAttention, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> None:
        """Note ``key`` and ``value`` ([T, K, D], after the rotary embedding) and store them."""
        self._note(layer, "k", key, batch)
        self._note(layer, "v", value, batch)
        self._backend.store(layer, key, value, batch)

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
    ) -> torch.Tensor:
        """Note ``query`` ([T, H, D], after the rotary embedding) and return its attention."""
        self._note(layer, "q", query, batch)
        return self._backend.attend(layer, query, batch, call)

    def _note(
        self, layer: LayerAttention, side: Side, values: torch.Tensor, batch: AttentionBatch
    ) -> None:
        self.observations.observe(
            self.part, layer.geometry.layer, side, values, self.samples, batch.query_lens_host
        )
