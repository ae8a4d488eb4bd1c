"""Decides whether queries are quantized too (FP8 attention), and with which scales."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv8.errors import ScaleError
from kv8.geometry import LayerGeometry
from kv8.options import MissingScales, QueryDtype
from kv8.scales.scale import Origin, OriginKind, Scale, ScaleProblem
from kv8.scales.sources import ScaleSources, refuse_unusable
from kv8.scales.wording import layer_list

_GARBAGE = (
    "llm-compressor 0.14.0 and 0.14.0.1 are known to write q scales from uninitialised memory"
)


@dataclass(frozen=True)
class QueryDecision:
    """Whether queries are quantized, and why.

    Attributes:
        scales: q scale of every quantized layer; empty when queries stay native.
        reason: one sentence for the log.
        warning: the same for a person who should act, or empty.
    """

    scales: dict[int, Scale] = field(default_factory=dict)
    reason: str = ""
    warning: str = ""


def decide_queries(
    layers: Sequence[LayerGeometry],
    sources: ScaleSources,
    query_dtype: QueryDtype,
    missing_scales: MissingScales,
) -> QueryDecision:
    """Return whether the queries of ``layers``, all those with a quantized cache, are quantized.

    ``auto`` quantizes them when every layer has a calibrated q scale. One unusable q scale makes
    all q scales of its source suspect: whoever wrote it wrote the others.

    Raises:
        ScaleError: ``fp8`` was asked for and q scales are unusable, or missing from a source that
            has some.
    """
    if query_dtype == "native":
        return QueryDecision(reason="FP8 attention is off: query_dtype=native was given.")
    found, problems = _usable(layers, sources)
    lacking = [layer.layer for layer in layers if layer.layer not in found]
    if not lacking:
        origin = found[layers[0].layer].origin
        return QueryDecision(found, f"FP8 attention is on: every layer has a q scale ({origin}).")

    declaration = sources.checkpoint.declaration
    expected = sources.knows("q") or (declaration is not None and declaration.queries)
    if query_dtype == "fp8":
        return _insist(found, lacking, problems, expected and missing_scales == "error")
    if problems:
        first = problems[0]
        return QueryDecision(
            warning=f"FP8 attention is off, queries stay unquantized: the q scales of "
            f"{layer_list(p.layer for p in problems)} are unusable ({first.text}). {_GARBAGE}; "
            "k and v scales are not affected. Calibrate with another version to use FP8 attention."
        )
    if expected:
        return QueryDecision(
            warning="FP8 attention is off, queries stay unquantized: there is no q scale in "
            f"{layer_list(lacking)}, though others have one or the checkpoint declares them."
        )
    return QueryDecision(reason="FP8 attention is off: there are no calibrated q scales.")


def _usable(
    layers: Sequence[LayerGeometry], sources: ScaleSources
) -> tuple[dict[int, Scale], list[ScaleProblem]]:
    found: dict[int, Scale] = {}
    problems: list[ScaleProblem] = []
    for source in sources.ordered:
        bad = [problem for problem in source.problems if problem.side == "q"]
        needed = [layer.layer for layer in layers if layer.layer not in found]
        if bad and needed:
            problems += bad
            continue
        for number in needed:
            scale = source.layer(number).q
            if scale is not None:
                found[number] = scale
    return found, problems


def _insist(
    found: dict[int, Scale], lacking: list[int], problems: list[ScaleProblem], strict: bool
) -> QueryDecision:
    if problems:
        remedy = (
            f"query_dtype=fp8 needs them. {_GARBAGE}: calibrate with another version, give q "
            "scales with kv_scales, or use query_dtype=native."
        )
        raise refuse_unusable(problems, remedy)
    if strict:
        raise ScaleError(
            f"query_dtype=fp8 needs a q scale in every layer, but there is none in "
            f"{layer_list(lacking)}, though others have one or the checkpoint declares them. Give "
            "them with kv_scales, use query_dtype=native, or accept 1.0 with "
            "missing_scales=default."
        )
    default = Scale((1.0,), Origin(OriginKind.DEFAULT, "1.0"))
    return QueryDecision(
        scales={**found, **dict.fromkeys(lacking, default)},
        warning=f"FP8 attention is on as query_dtype=fp8 asks, with the uncalibrated q scale 1.0 "
        f"in {layer_list(lacking)}.",
    )
