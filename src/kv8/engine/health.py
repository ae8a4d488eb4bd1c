"""Watches what quantization does to the cache and says so, once, to whoever runs the engine."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kv8.engine.counters import CacheCounters, LayerStoreCounts, StoreCounts
from kv8.layer_plan import LayerPlan
from kv8.scales.scale import ModelScales, OriginKind, Scale

logger = logging.getLogger(__name__)

# A default scale of 1.0 fits most models exactly, so clipping one value in 100,000 already says it
# does not fit this one. A calibrated scale may clip rare outliers on purpose, but not one in 100.
DEFAULT_SCALE_LIMIT = 1e-5
CALIBRATED_SCALE_LIMIT = 1e-2
# Values far smaller than the rest are lost under any scale; where most are, it is too large.
UNDERFLOW_LIMIT = 0.5


@dataclass(frozen=True)
class Misfit:
    """One side of one layer that clips, or stores as zero, more than it should."""

    layer: int
    side: str
    share: float
    scale: Scale

    def __str__(self) -> str:
        return f"layer {self.layer} {self.side} {_percent(self.share)}"


def find_saturation(counts: Mapping[int, LayerStoreCounts], scales: ModelScales) -> list[Misfit]:
    """Return every layer and side whose share of clipped values is beyond its limit."""
    return [
        Misfit(layer, side, seen.saturated_share, scale)
        for layer, side, seen, scale in _sides(counts, scales)
        if seen.saturated_share >= _limit(scale)
    ]


def find_underflow(counts: Mapping[int, LayerStoreCounts], scales: ModelScales) -> list[Misfit]:
    """Return every layer and side most of whose values were too small for its scale."""
    return [
        Misfit(layer, side, seen.underflowed_share, scale)
        for layer, side, seen, scale in _sides(counts, scales)
        if seen.underflowed_share >= UNDERFLOW_LIMIT
    ]


def _limit(scale: Scale) -> float:
    default = scale.origin.kind is OriginKind.DEFAULT
    return DEFAULT_SCALE_LIMIT if default else CALIBRATED_SCALE_LIMIT


def _sides(
    counts: Mapping[int, LayerStoreCounts], scales: ModelScales
) -> Iterator[tuple[int, str, StoreCounts, Scale]]:
    """Give every layer and side that has a scale, with its counts."""
    for layer, layer_counts in counts.items():
        sides: list[tuple[str, StoreCounts, Scale | None]] = [
            ("k", layer_counts.k, scales.layer(layer).k),
            ("v", layer_counts.v, scales.layer(layer).v),
        ]
        for side, side_counts, scale in sides:
            if scale is not None:
                yield layer, side, side_counts, scale


class CacheHealth:
    """Warns after at most one check in an engine's life (and one more once its scales change).

    Args:
        plan: format of each layer, to name it.
        scales: scales in use.
        skip_layers: the skip list in use, which the remedy must keep.
    """

    def __init__(
        self, plan: LayerPlan, scales: ModelScales, skip_layers: Sequence[str] = ()
    ) -> None:
        self._plan = plan
        self._scales = scales
        self._skip_layers = tuple(skip_layers)
        self.warned = False

    def scales_changed(self, scales: ModelScales) -> None:
        """Watch new scales, with a fresh right to one warning."""
        self._scales = scales
        self.warned = False

    def check(self, counters: CacheCounters, *, during: str) -> None:
        """Warn if a layer clips or loses too much and no warning was given yet.

        Args:
            counters: what was stored so far; not read once a warning was given.
            during: what was being stored, for the message.
        """
        if self.warned:
            return
        counts = counters.read()
        if clipped := find_saturation(counts, self._scales):
            self._warn(f"clips values ({_cause(clipped)}). Share clipped", clipped, during)
        if lost := find_underflow(counts, self._scales):
            what = "stores most values as zero (its scales are too large). Share lost"
            self._warn(what, lost, during)

    def _warn(self, what: str, found: list[Misfit], during: str) -> None:
        self.warned = True
        layers = list(dict.fromkeys(item.layer for item in found))
        formats = " and ".join(dict.fromkeys(self._plan.format(layer).name for layer in layers))
        logger.warning(
            "The %s KV cache %s %s: %s. The output may be noise. Remedy: calibrate and serve the "
            "calibrated checkpoint, give scales with --kv-scales FILE (kv_scales=), or keep these "
            "layers in the model's dtype: --kv-cache-dtype-skip-layers %s",
            formats,
            what,
            during,
            ", ".join(map(str, found)),
            ",".join((*self._skip_layers, spell_layers(layers))),
        )


def _cause(found: Sequence[Misfit]) -> str:
    calibrated = [i for i in found if i.scale.origin.kind is not OriginKind.DEFAULT]
    if not calibrated:
        return "it has no calibrated scale and uses 1.0"
    if len(calibrated) == len(found):
        return "its scales do not fit this text"
    return "some scales are 1.0 by default, others do not fit this text"


def spell_layers(layers: Iterable[int]) -> str:
    """Return layer numbers as the skip list takes them: ``"0,3-5"``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
