"""The report on a calibration: what each layer's scales are, and what they do to other text."""

from dataclasses import asdict, dataclass
from typing import Any

from kv8.calibration.observations import MEASURED, PARTS, Observations, Part
from kv8.calibration.report_side import SideReport, report_side
from kv8.calibration.report_table import layer_table
from kv8.calibration.report_warnings import find_warnings
from kv8.calibration.scales import make_scales
from kv8.calibration.sources import Samples
from kv8.calibration.statistic_names import DEFAULT_PERCENTILE, describe_statistic
from kv8.formats.base import KVFormat
from kv8.geometry import ModelGeometry
from kv8.scales.scale import SIDES, ModelScales
from kv8.scales.validity import Strategy


@dataclass(frozen=True)
class Conditions:
    """How a calibration was made.

    Attributes:
        model: its name, as the user gave it.
        samples: what it was made on.
        kv_format: what the scales are for.
        strategy: one scale a tensor, or one a head.
        statistic: what they were made from.
        percentile: where that is ``percentile``, which.
    """

    model: str
    samples: Samples
    kv_format: KVFormat
    strategy: Strategy = "tensor"
    statistic: str = "absmax"
    percentile: float = DEFAULT_PERCENTILE


@dataclass(frozen=True)
class CalibrationReport:
    """What was measured, on what, and how well it does on text that was kept apart.

    Attributes:
        conditions: how the calibration was made.
        num_samples: by part of the data (``first``, ``second``, ``held_out``), samples.
        num_tokens: the same in tokens.
        rows: each side of each layer that has a scale, in order.
        reads: layers that read another layer's keys and values, and which.
        warnings: what a reader must not miss.
    """

    conditions: Conditions
    num_samples: dict[Part, int]
    num_tokens: dict[Part, int]
    rows: tuple[SideReport, ...]
    reads: dict[int, int]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON: no NaN, no infinity."""
        how, samples = self.conditions, self.conditions.samples
        return {
            "model": how.model,
            "kv_cache_dtype": how.kv_format.name,
            "strategy": how.strategy,
            "statistic": describe_statistic(how.statistic, how.percentile),
            "data": samples.description,
            "data_digest": samples.digest,
            "tokens_asked": samples.tokens_asked,
            "tokens_used": samples.tokens_used,
            "tokens_by_part": self.num_tokens,
            "samples_by_part": self.num_samples,
            "layers": [asdict(row) for row in self.rows],
            "reads_layer": {str(layer): source for layer, source in self.reads.items()},
            "warnings": list(self.warnings),
        }

    def as_table(self) -> str:
        """Return the layers as text, a line for each side."""
        return layer_table(self.rows, self.reads)

    def heading(self) -> str:
        """Return what was measured and on what, in two lines."""
        how, samples = self.conditions, self.conditions.samples
        each = "tensor" if how.strategy == "tensor" else "head"
        return (
            f"{how.model}: one {how.kv_format.name} scale a {each}, from the "
            f"{describe_statistic(how.statistic, how.percentile)}\n"
            f"{samples.tokens_used:,} tokens of {samples.tokens_asked:,} asked for, from "
            f"{samples.description}, in {len(samples.sequences):,} samples, "
            f"{self.num_samples['held_out']:,} of them held out"
        )

    def __str__(self) -> str:
        return f"{self.heading()}\n{self.as_table()}"


def make_report(
    observations: Observations,
    scales: ModelScales,
    geometry: ModelGeometry,
    conditions: Conditions,
) -> CalibrationReport:
    """Return the report on ``scales``, which were made from ``observations``.

    Raises:
        ScaleError: a layer was not observed, or a value was not finite; names it.
    """
    halves = _halves(observations, scales, geometry, conditions)
    rows = []
    for layer in geometry.layers:
        for side in SIDES:
            scale = scales.layer(layer.layer).side(side)
            if scale is not None:
                pair = [half.layer(layer.layer).side(side) for half in halves]
                found = [half for half in pair if half is not None]
                rows.append(
                    report_side(observations, layer, side, scale, found, conditions.kv_format)
                )
    return CalibrationReport(
        conditions=conditions,
        num_samples={part: observations.num_samples[part] for part in PARTS},
        num_tokens={part: observations.num_tokens[part] for part in PARTS},
        rows=tuple(rows),
        reads={layer.layer: layer.kv_source for layer in geometry.layers if not layer.owns_kv},
        warnings=find_warnings(
            rows,
            observations,
            conditions.strategy,
            conditions.statistic,
            conditions.percentile,
        ),
    )


def _halves(
    observations: Observations,
    scales: ModelScales,
    geometry: ModelGeometry,
    conditions: Conditions,
) -> list[ModelScales]:
    """Return the scales that each half of the data gives alone; none if a half has no samples."""
    if not all(observations.num_tokens[part] for part in MEASURED):
        return []
    sides = [side for side in SIDES if any(layer.side(side) for _, layer in scales)]
    return [
        make_scales(
            observations,
            geometry,
            conditions.kv_format,
            strategy=conditions.strategy,
            statistic=conditions.statistic,
            percentile=conditions.percentile,
            sides=sides,
            parts=(part,),
        )
        for part in MEASURED
    ]
