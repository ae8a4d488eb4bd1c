"""How a file's scales came about: the text in its header, written and read in one place.

The same entries stand in a scales file and in the scales shard of a checkpoint, so that whoever
loads either can say "calibration, 65,536 tokens, absmax" and not just a file name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kv8.errors import ScaleError
from kv8.formats.base import FORMATS, FP8_E4M3
from kv8.scales.scale import SIDES, ModelScales, OriginKind, Side
from kv8.scales.validity import Strategy

FORMAT = "kv8-scales"
VERSION = "1"
_LIBRARY = "version_of_"
_NOTE = "note_on_"
_STRATEGIES: Mapping[str, Strategy] = {"tensor": "tensor", "attn_head": "attn_head"}
_QUANTIZED = tuple(name for name, each in FORMATS.items() if each.quantized)
_WHOLE_NUMBER = re.compile("[0-9]{1,18}")


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


def is_ours(header: Mapping[str, str]) -> bool:
    """Whether a safetensors header says that kv8 wrote the file."""
    return FORMAT in (header.get("format"), header.get("contents"))


def parse_header(header: Mapping[str, str], file: str) -> ScalesFileMetadata | None:
    """Return what a safetensors header says of its scales; `None` if kv8 did not write it.

    Entries that are missing come out empty. Text that is for people is taken as it is; what has a
    meaning to kv8 must be something that kv8 writes.

    Args:
        header: the entries.
        file: the file's name, for the error.

    Raises:
        ScaleError: an entry has a value it cannot have; names file, entry, value and what can be.
    """
    if not is_ours(header):
        return None
    number = header.get("num_tokens", "0")
    if not _WHOLE_NUMBER.fullmatch(number):
        raise _refused(file, "num_tokens", number, "a whole number of at least 0")
    strategy = header.get("strategy", "")
    if strategy and strategy not in _STRATEGIES:
        raise _refused(file, "strategy", strategy, f"{' or '.join(_STRATEGIES)}, or left out")
    kv_format = header.get("kv_cache_dtype", FP8_E4M3.name)
    if kv_format not in _QUANTIZED:
        raise _refused(file, "kv_cache_dtype", kv_format, " or ".join(_QUANTIZED))
    return ScalesFileMetadata(
        producer=header.get("producer", ""),
        statistic=header.get("statistic", "unnamed statistic"),
        num_tokens=int(number),
        model=header.get("model", "unnamed"),
        geometry=header.get("geometry", ""),
        weights=header.get("weights", ""),
        strategy=_STRATEGIES.get(strategy),
        source=header.get("source", ""),
        kv_cache_dtype=kv_format,
        versions=_entries(header, _LIBRARY),
        notes=_entries(header, _NOTE),
    )


def _refused(file: str, entry: str, found: str, allowed: str) -> ScaleError:
    return ScaleError(
        f"{file}: {entry} in its header is {found!r:.80}, and must be {allowed}. The file was "
        f"damaged or changed after kv8 wrote it: get it again, or calibrate again."
    )


def _entries(header: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {k.removeprefix(prefix): v for k, v in header.items() if k.startswith(prefix)}
