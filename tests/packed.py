"""Runs a hooked model over packed sequences in chunks, without an engine, to test the parts."""

from collections.abc import Callable, Mapping, Sequence

import torch

from kv8.attention.backend import AttentionBackend
from kv8.attention.layer import LayerAttention
from kv8.attention.reference import ReferenceBackend
from kv8.formats.base import FORMATS
from kv8.geometry import LayerGeometry
from kv8.models.hook import HookedModel
from kv8.models.probe import probe_batch, probe_layer


def make_layers(model: HookedModel, num_tokens: int) -> dict[int, LayerAttention]:
    """Return unquantized layers of the model's dtype with room for ``num_tokens``."""
    kv_format = FORMATS[str(model.dtype).removeprefix("torch.")]
    layers: dict[int, LayerAttention] = {}
    for geometry in model.geometry.layers:
        owner = None if geometry.owns_kv else layers[geometry.kv_source]
        layers[geometry.layer] = probe_layer(
            geometry, num_tokens, model.device, kv_format=kv_format, owner=owner
        )
    return layers


def packed_logits(
    model: HookedModel,
    sequences: Sequence[Sequence[int]],
    *,
    chunk: int | None = None,
    backend: AttentionBackend | None = None,
    layers: Mapping[int, LayerAttention] | None = None,
) -> list[torch.Tensor]:
    """Return the logits [n, V] of each sequence, packed, ``chunk`` tokens of each in a step.

    All sequences are cut into the same number of steps; the last one takes what is left of each.
    """
    backend = backend or ReferenceBackend()
    lengths = [len(sequence) for sequence in sequences]
    layers = layers or make_layers(model, sum(lengths) + 16 * len(lengths))
    num_steps = 1 if chunk is None else max(1, min(lengths) // chunk)
    ends = [[(step + 1) * (chunk or 0) for _ in lengths] for step in range(num_steps - 1)]
    ends.append(lengths)
    starts = [0] * len(lengths)
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for stops in ends:
        spans = list(zip(starts, stops, strict=True))
        ids = [
            token
            for sequence, (a, b) in zip(sequences, spans, strict=True)
            for token in sequence[a:b]
        ]
        positions = torch.cat([torch.arange(a, b) for a, b in spans])
        new = [b - a for a, b in spans]
        batch = probe_batch(new, stops, lengths, model.device)
        with model.bound(batch, layers, backend):
            logits = model.forward(torch.tensor(ids), positions, torch.arange(len(ids)))
        for part, rows in zip(parts, logits.split(new), strict=True):
            part.append(rows)
        starts = stops
    return [torch.cat(part) for part in parts]


class PassThroughBackend:
    """Keeps one sequence's K and V as they come and attends with a function given by the test."""

    name = "pass-through"

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.calls: dict[int, object] = {}
        self._attend = attend

    def refuses(self, layer: LayerAttention) -> str | None:
        return None

    def store(
        self, layer: LayerAttention, key: torch.Tensor, value: torch.Tensor, batch: object
    ) -> None:
        number = layer.geometry.layer
        assert number not in self.keys
        self.keys[number], self.values[number] = key, value

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, batch: object, call: object
    ) -> torch.Tensor:
        geometry: LayerGeometry = layer.geometry
        self.calls[geometry.layer] = call
        key, value = self.keys[geometry.kv_source], self.values[geometry.kv_source]
        return self._attend(geometry, query, key, value, call)
