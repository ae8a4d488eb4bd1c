"""One layer of the report: what it stores, under which scales from where, and what that lost."""

from dataclasses import dataclass
from typing import Any

from kv8.engine.counters import StoreCounts
from kv8.scales.scale import SIDES, Scale, Side


@dataclass(frozen=True)
class LayerReport:
    """One layer of the table.

    Attributes:
        layer: the model's layer number.
        type: the layer type as the model's config spells it.
        dtype: what its keys and values are stored as, by kv8's name.
        skipped_by: the skip list entry that kept it in the model's dtype, or `None`.
        reads_layer: the layer whose keys and values it reads, or `None` if it stores its own.
        bytes_per_token: bytes of codes one token takes in this layer; 0 if it stores none.
        q: scale of the queries, `None` where they are not quantized.
        k: scale of the keys, `None` where they are not quantized.
        v: scale of the values, `None` where they are not quantized.
        k_counts: what storing did to the keys, `None` before anything can have been stored.
        v_counts: what storing did to the values, likewise.
    """

    layer: int
    type: str
    dtype: str
    skipped_by: str | None
    reads_layer: int | None
    bytes_per_token: int
    q: Scale | None = None
    k: Scale | None = None
    v: Scale | None = None
    k_counts: StoreCounts | None = None
    v_counts: StoreCounts | None = None

    def scale(self, side: Side) -> Scale | None:
        """Return the scale of one side."""
        return {"q": self.q, "k": self.k, "v": self.v}[side]

    def counts(self, side: Side) -> StoreCounts | None:
        """Return the counts of one side; queries are not stored and have none."""
        return {"q": None, "k": self.k_counts, "v": self.v_counts}[side]

    def as_json(self) -> dict[str, Any]:
        """Return the layer as plain data; a per-head scale is a list, an absent one `None`."""
        sides: dict[str, Any] = {}
        for side in SIDES:
            scale, counts = self.scale(side), self.counts(side)
            sides[side] = {
                "scale": None if scale is None else _plain(scale),
                "origin": None if scale is None else str(scale.origin),
            }
            if counts is not None:
                sides[side] |= {
                    "stored": counts.stored,
                    "saturated": counts.saturated,
                    "saturated_share": counts.saturated_share,
                    "underflowed": counts.underflowed,
                    "underflowed_share": counts.underflowed_share,
                    "not_a_number": counts.not_a_number,
                }
        return {
            "layer": self.layer,
            "type": self.type,
            "dtype": self.dtype,
            "skipped": self.skipped_by is not None,
            "skipped_by": self.skipped_by,
            "reads_layer": self.reads_layer,
            "bytes_per_token": self.bytes_per_token,
            **sides,
        }


def _plain(scale: Scale) -> float | list[float]:
    return list(scale.values) if scale.per_head else scale.values[0]
