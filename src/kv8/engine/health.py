"""Watches what quantization does to the cache and says so, once, to whoever runs the engine."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kv8.engine.counters import CacheCounters, LayerStoreCounts, StoreCounts
from kv8.layer_plan import LayerPlan
from kv8.scales.scale import ModelScales, OriginKind, Scale

logger = logging.getLogger(__name__)

# A default scale of 1.0 fits most models exactly, so clipping one value in 100,000 already says it
# does not fit this one. A calibrated scale may clip rare outliers on purpose, but not one in 100.
DEFAULT_SCALE_LIMIT = 1e-5
CALIBRATED_SCALE_LIMIT = 1e-2


@dataclass(frozen=True)
class Saturation:
    """One side of one layer that clips more than it should."""

    layer: int
    side: str
    share: float
    scale: Scale

    def __str__(self) -> str:
        return f"layer {self.layer} {self.side} {_percent(self.share)}"


def find_saturation(
    counts: Mapping[int, LayerStoreCounts], scales: ModelScales
) -> list[Saturation]:
    """Return every layer and side whose share of clipped values is beyond its limit."""
    found = []
    for layer, layer_counts in counts.items():
        sides: list[tuple[str, StoreCounts, Scale | None]] = [
            ("k", layer_counts.k, scales.layer(layer).k),
            ("v", layer_counts.v, scales.layer(layer).v),
        ]
        for side, side_counts, scale in sides:
            if scale is None:
                continue
            default = scale.origin.kind is OriginKind.DEFAULT
            limit = DEFAULT_SCALE_LIMIT if default else CALIBRATED_SCALE_LIMIT
            if side_counts.saturated_share >= limit:
                found.append(Saturation(layer, side, side_counts.saturated_share, scale))
    return found


class CacheHealth:
    """Warns at most once in an engine's life (and once more after its scales change).

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
        """Warn if a layer clips too much and no warning was given yet.

        Args:
            counters: what was stored so far; not read once a warning was given.
            during: what was being stored, for the message.
        """
        if self.warned:
            return
        found = find_saturation(counters.read(), self._scales)
        if found:
            self.warned = True
            logger.warning("%s", self._message(found, during))

    def _message(self, found: list[Saturation], during: str) -> str:
        layers = list(dict.fromkeys(item.layer for item in found))
        formats = " and ".join(dict.fromkeys(self._plan.format(layer).name for layer in layers))
        calibrated = [i for i in found if i.scale.origin.kind is not OriginKind.DEFAULT]
        cause = (
            "its scales do not fit this text"
            if len(calibrated) == len(found)
            else "it has no calibrated scale and uses 1.0"
            if not calibrated
            else "some scales are 1.0 by default, others do not fit this text"
        )
        return (
            f"The {formats} KV cache clips values ({cause}). Share clipped {during}: "
            f"{', '.join(map(str, found))}. The output may be noise. Remedy: calibrate and serve "
            f"the calibrated checkpoint, give scales with --kv-scales FILE (kv_scales=), or keep "
            f"these layers in the model's dtype: "
            f"--kv-cache-dtype-skip-layers {','.join((*self._skip_layers, spell_layers(layers)))}"
        )


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
