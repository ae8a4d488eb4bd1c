"""The plan itself: data that others read."""

import hashlib
from dataclasses import dataclass

from kv8.formats.base import KVFormat


@dataclass(frozen=True)
class LayerFormat:
    """One layer's storage format and why it has it.

    Attributes:
        layer: the model's layer number.
        format: the format its keys and values are stored in; for a layer that reads another
            layer's KV, that layer's format.
        skipped_by: the skip list entry that kept this layer in the model's dtype, or `None`.
    """

    layer: int
    format: KVFormat
    skipped_by: str | None = None


@dataclass(frozen=True)
class LayerPlan:
    """The format of every layer with attention, in the model's order.

    Attributes:
        layers: one entry a layer.
        notes: what a reader of the log should know of how the plan came about.
    """

    layers: tuple[LayerFormat, ...]
    notes: tuple[str, ...] = ()

    def format(self, layer: int) -> KVFormat:
        """Return the format of layer ``layer``; raises `KeyError` for an unknown number."""
        for entry in self.layers:
            if entry.layer == layer:
                return entry.format
        raise KeyError(layer)

    @property
    def quantized_layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose keys and values are stored quantized."""
        return tuple(entry.layer for entry in self.layers if entry.format.quantized)

    def fingerprint(self) -> bytes:
        """Return 16 bytes that differ whenever any layer's format differs.

        Part of every prefix digest, beside `ModelScales.fingerprint`.
        """
        text = ";".join(f"{entry.layer}={entry.format.name}" for entry in self.layers)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
