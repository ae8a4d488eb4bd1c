"""All that calibration saw: by part of the data, layer and side. Mergeable, savable, checkable."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, Literal

import torch
from safetensors import SafetensorError, safe_open

from kv8.calibration.histogram import MagnitudeHistogram
from kv8.calibration.ranges import SampleRanges
from kv8.errors import ModelError, ScaleError
from kv8.geometry import ModelGeometry
from kv8.scales.scale import SIDES, Side
from kv8.scales.tensor_writer import CHECKSUM, checksum, write_tensors
from kv8.scales.wording import layer_list

Part = Literal["first", "second", "held_out"]

# The two halves scales are made from, and what they are judged by.
MEASURED: Final[tuple[Part, ...]] = ("first", "second")
PARTS: Final[tuple[Part, ...]] = (*MEASURED, "held_out")

_SIDE_NAMES: Final[dict[Side, str]] = {"q": "queries", "k": "keys", "v": "values"}


class Observations:
    """Histograms of every layer's queries, keys and values, and each sample's extremes.

    Args:
        dtype: name of the type the values have, the model's.
        source: what the tokens are if they are no text (``random``), for the scales' origin.

    Attributes:
        num_tokens: by part, tokens observed.
        num_samples: by part, samples observed.
    """

    def __init__(self, dtype: str = "float32", source: str = "") -> None:
        self.dtype = dtype
        self.source = source
        self.num_tokens: dict[Part, int] = dict.fromkeys(PARTS, 0)
        self.num_samples: dict[Part, int] = dict.fromkeys(PARTS, 0)
        self._histograms: dict[tuple[Part, int, Side], MagnitudeHistogram] = {}
        self._ranges: dict[tuple[Part, int, Side], SampleRanges] = {}

    def observe(
        self,
        part: Part,
        layer: int,
        side: Side,
        values: torch.Tensor,
        samples: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """Note one layer's values of a step.

        Args:
            part: the part of the data all of them belong to.
            layer: the model's layer number.
            side: q, k or v.
            values: [T, heads, D], tokens of several samples one after another; only read.
            samples: number of each sample.
            lengths: tokens each sample has here; their sum is T.
        """
        key, heads = (part, layer, side), values.shape[1]
        if key not in self._histograms:
            self._histograms[key] = MagnitudeHistogram(heads, values.device)
            self._ranges[key] = SampleRanges(heads)
        ends = accumulate(lengths)
        pieces = [values[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        low = torch.stack([piece.amin(dim=(0, 2)) for piece in pieces])
        high = torch.stack([piece.amax(dim=(0, 2)) for piece in pieces])
        self._ranges[key].add(list(samples), low, high)
        self._histograms[key].observe(values, torch.maximum(-low, high).amax(dim=0))

    def count(self, part: Part, num_tokens: int, num_samples: int) -> None:
        """Note that so many tokens and samples of ``part`` have gone through all layers."""
        self.num_tokens[part] += num_tokens
        self.num_samples[part] += num_samples

    def histogram(
        self, layer: int, side: Side, parts: Iterable[Part] = MEASURED
    ) -> MagnitudeHistogram | None:
        """Return the histogram of all ``parts`` together, `None` if nothing was observed."""
        total: MagnitudeHistogram | None = None
        for part in parts:
            found = self._histograms.get((part, layer, side))
            if found is not None:
                total = total or MagnitudeHistogram(found.num_heads)
                total.merge(found)
        return total

    def ranges(
        self, layer: int, side: Side, parts: Iterable[Part] = MEASURED
    ) -> SampleRanges | None:
        """Return the samples' extremes of all ``parts``, `None` if nothing was observed."""
        total: SampleRanges | None = None
        for part in parts:
            found = self._ranges.get((part, layer, side))
            if found is not None:
                total = total or SampleRanges(found.low.shape[1])
                total.merge(found)
        return total

    def merge(self, other: "Observations") -> None:
        """Add what ``other`` observed, of other samples."""
        assert other.dtype == self.dtype, f"{other.dtype} observations among {self.dtype} ones"
        for part in PARTS:
            self.count(part, other.num_tokens[part], other.num_samples[part])
        for key, histogram in other._histograms.items():
            if key not in self._histograms:
                self._histograms[key] = MagnitudeHistogram(histogram.num_heads)
                self._ranges[key] = SampleRanges(histogram.num_heads)
            self._histograms[key].merge(histogram)
            self._ranges[key].merge(other._ranges[key])

    def check_finite(self) -> None:
        """Raise if a value was NaN or infinite.

        Raises:
            ScaleError: names the layers and sides.
        """
        faulty: dict[str, list[int]] = {}
        for (_, layer, side), histogram in self._histograms.items():
            if not histogram.finite:
                faulty.setdefault(_SIDE_NAMES[side], []).append(layer)
        if faulty:
            where = " and ".join(f"{side} of {layer_list(n)}" for side, n in faulty.items())
            raise ScaleError(
                f"The {where} are not finite (NaN or infinite) for the calibration text, so no "
                f"scale fits them. The model computes in {self.dtype}; try dtype=bfloat16 or "
                f"dtype=float32 (--dtype)."
            )

    def check_complete(self, geometry: ModelGeometry) -> None:
        """Raise unless every layer's queries, keys and values were observed for every token.

        Keys and values are those of the layers that store their own.

        Raises:
            ScaleError: names the layers that calibration did not see, or not all of.
        """
        expected = sum(self.num_tokens[part] for part in MEASURED)
        if expected == 0:
            raise ScaleError("Nothing was observed: calibration needs at least one token.")
        lacking: dict[Side, dict[int, int]] = {}
        for layer in geometry.layers:
            for side in SIDES:
                if side != "q" and not layer.owns_kv:
                    continue
                found = self.histogram(layer.layer, side)
                seen = 0 if found is None else found.num_tokens
                if seen != expected:
                    lacking.setdefault(side, {})[layer.layer] = seen
        if lacking:
            where = ", ".join(
                f"{_SIDE_NAMES[side]} of {layer_list(layers)}"
                f" ({', '.join(f'{seen:,}' for seen in sorted(set(layers.values())))})"
                for side, layers in lacking.items()
            )
            raise ScaleError(
                f"Calibration did not see all of the {expected:,} tokens it was given in every "
                f"layer: {where} (tokens seen). Scales for them would be made up, so none were "
                f"made."
            )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return everything but the counts of tokens and samples, samples in order."""
        tensors: dict[str, torch.Tensor] = {}
        for (part, layer, side), histogram in self._histograms.items():
            both = histogram.tensors() | self._ranges[part, layer, side].tensors()
            tensors |= {f"{part}.{layer}.{side}.{name}": value for name, value in both.items()}
        return tensors

    def save(
        self,
        path: Path,
        *,
        extra: Mapping[str, torch.Tensor] | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        """Write everything to a safetensors file, whole or not at all.

        Args:
            path: the file.
            extra: tensors to write with it, under names without a dot.
            facts: entries to write into its header.

        Raises:
            OSError: it cannot be written; names the file, its size and the room there is.
        """
        tensors = {**(extra or {}), **self.tensors()}
        header = {
            **(facts or {}),
            "dtype": self.dtype,
            "source": self.source,
            "num_tokens": json.dumps(self.num_tokens),
            "num_samples": json.dumps(self.num_samples),
        }
        write_tensors(path, tensors, {**header, CHECKSUM: checksum(tensors, header)})

    @classmethod
    def load(cls, path: Path) -> "Observations":
        """Return what `save` wrote.

        Raises:
            ModelError: the file is missing or damaged.
        """
        try:
            with safe_open(path, "pt") as file:
                facts = dict(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if facts.pop(CHECKSUM, "none") != checksum(tensors, facts):
                raise ValueError("it has no checksum, or another content than was written")
            observations = cls(facts["dtype"], facts["source"])
            observations.num_tokens = json.loads(facts["num_tokens"])
            observations.num_samples = json.loads(facts["num_samples"])
            observations._take({name: each for name, each in tensors.items() if "." in name})
        except (SafetensorError, OSError, KeyError, ValueError, RuntimeError, TypeError) as error:
            raise ModelError(f"{path} holds no observations of a calibration: {error}.") from error
        return observations

    def _take(self, tensors: dict[str, torch.Tensor]) -> None:
        grouped: dict[tuple[Part, int, Side], dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            part, layer, side, what = name.split(".")
            grouped.setdefault((part, int(layer), side), {})[what] = tensor  # type: ignore[arg-type]
        for key, group in grouped.items():
            self._histograms[key] = MagnitudeHistogram.from_tensors(group)
            self._ranges[key] = SampleRanges.from_tensors(group)
