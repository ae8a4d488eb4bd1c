"""How a file's scales came about: the text in its header, written and read in one place.

The same entries stand in a scales file and in the scales shard of a checkpoint, so that whoever
loads either can say "calibration, 65,536 tokens, absmax" and not just a file name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kv8.formats.base import FP8_E4M3
from kv8.scales.validity import Strategy

FORMAT = "kv8-scales"
VERSION = "1"
_LIBRARY = "version_of_"
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
        }
        return {key: text for key, text in entries.items() if text}

    def as_shard_text(self) -> dict[str, str]:
        """Return the header entries of a checkpoint's scales shard.

        transformers refuses a shard whose ``format`` is not ``pt``, so kv8's own goes elsewhere.
        """
        return self.as_text() | {"format": "pt", "contents": FORMAT}

    @property
    def measured(self) -> str:
        """Tokens and statistic, as an origin spells them."""
        kind = f"{self.source} tokens" if self.source else "tokens"
        return f"{self.num_tokens:,} {kind}, {self.statistic}"


def parse_header(header: Mapping[str, str]) -> ScalesFileMetadata | None:
    """Return what a safetensors header says of its scales; `None` if kv8 did not write it.

    Entries that are missing or damaged come out empty: they are for people, and nothing is checked
    against them.
    """
    if FORMAT not in (header.get("format"), header.get("contents")):
        return None
    number = header.get("num_tokens", "")
    prefix = len(_LIBRARY)
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
        versions={k[prefix:]: v for k, v in header.items() if k.startswith(_LIBRARY)},
    )
