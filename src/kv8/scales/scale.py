"""A scale and its origin: the number that maps stored codes back to values, never without a source.

Convention, everywhere in kv8: ``stored = saturate(value / scale)``, ``value = stored * scale``,
scales in float32. "Absent" is a state (`None`), never the number 1.0.
"""

import enum
import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kv8.formats.base import FP8_E4M3

Side = Literal["q", "k", "v"]
SIDES: tuple[Side, ...] = ("q", "k", "v")


class OriginKind(enum.Enum):
    """The ways a scale can come into being."""

    CHECKPOINT = "checkpoint"
    FILE = "scales file"
    PYTHON = "given in Python"
    CALIBRATION = "calibration"
    INHERITED = "inherited"
    DEFAULT = "default"


@dataclass(frozen=True)
class Origin:
    """Where a scale came from: its kind, and the detail a reader needs to find it again.

    ``detail`` is a tensor name and file, a token count, or a layer number, by kind.
    """

    kind: OriginKind
    detail: str = ""

    def __str__(self) -> str:
        if not self.detail:
            return self.kind.value
        # A calibration's detail is an amount, the others' a place: "calibration, 4,096 tokens".
        separator = ", " if self.kind is OriginKind.CALIBRATION else ": "
        return f"{self.kind.value}{separator}{self.detail}"


@dataclass(frozen=True)
class Scale:
    """One side's scale in one layer.

    Attributes:
        values: one float32 value (per tensor) or one a head (H for q, K for k and v).
        origin: where the values came from.
    """

    values: tuple[float, ...]
    origin: Origin

    @property
    def per_head(self) -> bool:
        """Whether there is one value a head; a single head's scale counts as per tensor."""
        return len(self.values) > 1


@dataclass(frozen=True)
class LayerScales:
    """The scales of one layer; a side that has none is `None`."""

    q: Scale | None = None
    k: Scale | None = None
    v: Scale | None = None

    def side(self, side: Side) -> Scale | None:
        """Return the scale of one side."""
        return {"q": self.q, "k": self.k, "v": self.v}[side]


@dataclass(frozen=True)
class ScaleProblem:
    """A scale that was found but cannot be used: kept apart, and an error where it is needed.

    Attributes:
        layer: the layer it belongs to.
        side: q, k or v.
        text: the tensor, its file, the value or shape found, and why it is no scale.
    """

    layer: int
    side: Side
    text: str


@dataclass(frozen=True)
class ModelScales:
    """Scales of a whole model by layer number; a layer that is missing has none at all.

    Attributes:
        layers: the usable scales.
        problems: scales that were found and are unusable. They are absent from ``layers``.
        made_for: name of the format whose largest value they bring the largest value to.
        warnings: what a person should know before using them.
    """

    layers: Mapping[int, LayerScales] = field(default_factory=dict)
    problems: tuple[ScaleProblem, ...] = ()
    made_for: str = FP8_E4M3.name
    warnings: tuple[str, ...] = ()

    def layer(self, number: int) -> LayerScales:
        """Return the scales of layer ``number`` (all absent if it has none)."""
        return self.layers.get(number, LayerScales())

    def __iter__(self) -> Iterator[tuple[int, LayerScales]]:
        return iter(sorted(self.layers.items()))

    def fingerprint(self) -> bytes:
        """Return 16 bytes that differ whenever any number differs; origins do not count.

        q counts too: quantized queries change what a layer hands on, and so the keys and values
        that the next layers store. Part of every prefix digest: blocks stored under other scales
        are never found again.
        """
        digest = hashlib.blake2b(digest_size=16)
        for number, scales in self:
            for side in SIDES:
                scale = scales.side(side)
                values = scale.values if scale else ()
                digest.update(
                    struct.pack(f"<ic{len(values)}fI", number, side.encode(), *values, len(values))
                )
        return digest.digest()
