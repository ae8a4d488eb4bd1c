"""Which format each layer stores its keys and values in: the one function that decides.

The planner, the allocator, `kv8 inspect` and the layer table all read the plan made here.
"""

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
    """The format of every layer with attention, in the model's order."""

    layers: tuple[LayerFormat, ...]

    def format(self, layer: int) -> KVFormat:
        """Return the format of layer ``layer``; raises `KeyError` for an unknown number."""
        for entry in self.layers:
            if entry.layer == layer:
                return entry.format
        raise KeyError(layer)
