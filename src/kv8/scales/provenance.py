"""How a file's scales came about: the text in its header, written and read in one place.

The same entries stand in a scales file and in the scales shard of a checkpoint, so that whoever
loads either can say "calibration, 65,536 tokens, absmax" and not just a file name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kv8.formats.base import FP8_E4M3
from kv8.scales.scale import SIDES, ModelScales, OriginKind, Side
from kv8.scales.validity import Strategy

FORMAT = "kv8-scales"
VERSION = "1"
_LIBRARY = "version_of_"
_NOTE = "note_on_"
_STRATEGIES: Mapping[str, Strategy] = {"tensor": "tensor", "attn_head": "attn_head"}


@dataclass(frozen=True)
class ScalesFileMetadata:
    """How the scales of a file came about; written as text into the file's header.

    Attributes:
        producer: program and version that measured them.
        statistic: what they are made from (``absmax``, ``percentile 99.99``).
        num_tokens: tokens they were measured on.
        model: which model, for people.
        geometry: `kv8.scales.scales_file.geometry_fingerprint` of the model; empty: none checked.
        weights: `kv8.models.fingerprint.weights_fingerprint` of the model; empty: none checked.
        strategy: what one scale is per; `None` if nobody said.
        source: what kind of tokens, if not a text's (``random``).
        kv_cache_dtype: the format whose largest value the statistic was divided by.
        versions: versions of the libraries involved.
        notes: what else is to be said of single scales, by layer and side (``3.k``): that a head
            was always zero, so that its scale is a constant.
    """

    producer: str
    statistic: str
    num_tokens: int
    model: str
    geometry: str = ""
    weights: str = ""
    strategy: Strategy | None = None
    source: str = ""
    kv_cache_dtype: str = FP8_E4M3.name
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def as_text(self) -> dict[str, str]:
        """Return the header entries of a scales file."""
        entries = {
            "format": FORMAT,
            "version": VERSION,
            "producer": self.producer,
            "statistic": self.statistic,
            "num_tokens": str(self.num_tokens),
            "model": self.model,
            "geometry": self.geometry,
            "weights": self.weights,
            "strategy": self.strategy or "",
            "source": self.source,
            "kv_cache_dtype": self.kv_cache_dtype,
            **{f"{_LIBRARY}{name}": text for name, text in self.versions.items()},
            **{f"{_NOTE}{name}": text for name, text in self.notes.items()},
        }
        return {key: text for key, text in entries.items() if text}

    def as_shard_text(self) -> dict[str, str]:
        """Return the header entries of a checkpoint's scales shard.

        transformers refuses a shard whose ``format`` is not ``pt``, so kv8's own goes elsewhere.
        """
        return self.as_text() | {"format": "pt", "contents": FORMAT}

    def measured(self, layer: int, side: Side) -> str:
        """Return tokens and statistic of one scale, as an origin spells them."""
        kind = f"{self.source} tokens" if self.source else "tokens"
        note = self.notes.get(f"{layer}.{side}", "")
        return f"{self.num_tokens:,} {kind}, {self.statistic}{note and f', {note}'}"

    def with_notes(self, scales: ModelScales) -> "ScalesFileMetadata":
        """Return the metadata with what the origins of just measured ``scales`` say beyond it."""
        plain = replace(self, notes={})
        notes = {}
        for layer, of_layer in scales:
            for side in SIDES:
                scale, common = of_layer.side(side), f"{plain.measured(layer, side)}, "
                if scale is None or scale.origin.kind is not OriginKind.CALIBRATION:
                    continue
                if scale.origin.detail.startswith(common):
                    notes[f"{layer}.{side}"] = scale.origin.detail.removeprefix(common)
        return replace(self, notes=notes)


def parse_header(header: Mapping[str, str]) -> ScalesFileMetadata | None:
    """Return what a safetensors header says of its scales; `None` if kv8 did not write it.

    Entries that are missing or damaged come out empty: they are for people, and nothing is checked
    against them.
    """
    if FORMAT not in (header.get("format"), header.get("contents")):
        return None
    number = header.get("num_tokens", "")
    return ScalesFileMetadata(
        producer=header.get("producer", ""),
        statistic=header.get("statistic", "unnamed statistic"),
        num_tokens=int(number) if number.isascii() and number.isdecimal() else 0,
        model=header.get("model", "unnamed"),
        geometry=header.get("geometry", ""),
        weights=header.get("weights", ""),
        strategy=_STRATEGIES.get(header.get("strategy", "")),
        source=header.get("source", ""),
        kv_cache_dtype=header.get("kv_cache_dtype", FP8_E4M3.name),
        versions=_entries(header, _LIBRARY),
        notes=_entries(header, _NOTE),
    )


def _entries(header: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {k.removeprefix(prefix): v for k, v in header.items() if k.startswith(prefix)}
