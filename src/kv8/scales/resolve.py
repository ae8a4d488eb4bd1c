"""Gives every quantized layer its scales, each with its origin, or refuses by name.

By layer and side: scales given explicitly, then the checkpoint's, then 1.0 where that is allowed.
1.0 is allowed when nobody ever spoke of scales, or with ``missing_scales="default"``. Once a source
has any k or v scale, or the checkpoint declares a static scheme, a missing one was lost on the way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kv8.errors import RequestError, ScaleError
from kv8.formats.base import FP8_E4M3, FP8_E5M2, KVFormat
from kv8.geometry import LayerGeometry, ModelGeometry
from kv8.options import MissingScales, QueryDtype
from kv8.scales.checkpoint import CheckpointScales
from kv8.scales.collect import by_layer
from kv8.scales.queries import decide_queries
from kv8.scales.scale import ModelScales, Origin, OriginKind, Scale, ScaleProblem, Side
from kv8.scales.sources import ScaleSources, refuse_unusable
from kv8.scales.wording import layer_list


class FormatPlan(Protocol):
    """The part of a `kv8.layer_plan.LayerPlan` that is needed here."""

    def format(self, layer: int) -> KVFormat:
        """Return the format of layer ``layer``."""


@dataclass(frozen=True)
class ResolvedScales:
    """Scales ready for use.

    Attributes:
        scales: k and v for every layer with a quantized cache, and q where queries are quantized.
        fp8_queries: whether queries are quantized (FP8 attention).
        messages: what was decided and why, for the log. Empty for an unquantized cache.
        warnings: what a person should act on.
    """

    scales: ModelScales = field(default_factory=ModelScales)
    fp8_queries: bool = False
    messages: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def uncalibrated_layers(self) -> tuple[int, ...]:
        """Layers whose k or v scale is the default 1.0."""
        return tuple(
            number
            for number, scales in self.scales
            if any(s and s.origin.kind is OriginKind.DEFAULT for s in (scales.k, scales.v))
        )


def resolve_scales(
    geometry: ModelGeometry,
    plan: FormatPlan,
    checkpoint: CheckpointScales,
    explicit: ModelScales | None = None,
    missing_scales: MissingScales = "error",
    query_dtype: QueryDtype = "auto",
) -> ResolvedScales:
    """Return the scales of every layer whose cache ``plan`` quantizes.

    Raises:
        ScaleError: a needed scale is unusable or was lost; the message names layers and sides.
        RequestError: ``explicit`` or ``query_dtype="fp8"`` was given for a cache without any
            quantized layer, where neither could have an effect.
    """
    quantized = [each for each in geometry.layers if plan.format(each.layer).quantized]
    if not quantized:
        _require_nothing_asked(explicit, query_dtype)
        return ResolvedScales()
    formats = [plan.format(layer.layer) for layer in quantized]
    _require_range(explicit, formats)
    sources = ScaleSources(explicit, checkpoint)
    owners = [layer for layer in quantized if layer.owns_kv]
    chosen, missing = _find(owners, sources)
    warnings = _defaults(chosen, missing, sources, missing_scales)
    queries = decide_queries(quantized, sources, query_dtype, missing_scales)
    messages = _summary(chosen)
    if FP8_E5M2 in formats:
        messages += _in_wider_format(chosen, sources)
    warnings += explicit.warnings if explicit is not None else ()
    if any(scale.origin.kind is OriginKind.CHECKPOINT for scale in chosen.values()):
        messages += checkpoint.notes

    _inherit(chosen, quantized)
    chosen |= {(layer, "q"): scale for layer, scale in queries.scales.items()}
    return ResolvedScales(
        scales=ModelScales(by_layer(chosen)),
        fp8_queries=bool(queries.scales),
        messages=(*messages, queries.reason) if queries.reason else tuple(messages),
        warnings=(*warnings, queries.warning) if queries.warning else warnings,
    )


_Chosen = dict[tuple[int, Side], Scale]


def _require_range(explicit: ModelScales | None, formats: Sequence[KVFormat]) -> None:
    """Refuse scales that bring the largest value to 57,344 in a format that ends at 448."""
    if explicit is None or explicit.made_for != FP8_E5M2.name or FP8_E4M3 not in formats:
        return
    clipped = FP8_E5M2.finite_max / FP8_E4M3.finite_max
    raise ScaleError(
        f"kv_scales were made for {FP8_E5M2.name}: in {FP8_E4M3.name} everything beyond 1/"
        f"{clipped:.0f} of the measured range would be clipped. Serve with kv_cache_dtype="
        f"{FP8_E5M2.name}, or calibrate with kv_cache_dtype={FP8_E4M3.name}."
    )


def _require_nothing_asked(explicit: ModelScales | None, query_dtype: QueryDtype) -> None:
    remedy = "Quantize the cache with kv_cache_dtype=fp8 (--kv-cache-dtype fp8), or leave it out."
    if explicit is not None:
        raise RequestError(f"kv_scales was given, but no layer's cache is quantized. {remedy}")
    if query_dtype == "fp8":
        raise RequestError(
            f"query_dtype=fp8 was given, but no layer's cache is quantized and FP8 attention "
            f"reads an FP8 cache. {remedy}"
        )


def _find(
    owners: Sequence[LayerGeometry], sources: ScaleSources
) -> tuple[_Chosen, list[tuple[int, Side]]]:
    chosen: _Chosen = {}
    missing: list[tuple[int, Side]] = []
    unusable: list[ScaleProblem] = []
    sides: tuple[Side, ...] = ("k", "v")
    for layer in owners:
        for side in sides:
            found = sources.find(layer.layer, side)
            if isinstance(found, Scale):
                chosen[layer.layer, side] = found
            elif found is None:
                missing.append((layer.layer, side))
            else:
                unusable.append(found)
    if unusable:
        numbers = ",".join(str(n) for n in sorted({problem.layer for problem in unusable}))
        raise refuse_unusable(
            unusable,
            "Calibrate again, give good ones with kv_scales (--kv-scales), or keep these layers "
            f"unquantized with --kv-cache-dtype-skip-layers {numbers}.",
        )
    return chosen, missing


def _defaults(
    chosen: _Chosen,
    missing: Sequence[tuple[int, Side]],
    sources: ScaleSources,
    missing_scales: MissingScales,
) -> tuple[str, ...]:
    """Fill in 1.0 for what is missing, if that is allowed; return the warning to give."""
    if not missing:
        return ()
    declared = sources.checkpoint.declaration is not None
    expected = declared or sources.explicit is not None or sources.knows("k", "v")
    lacking = _by_sides(missing)
    if expected and missing_scales == "error":
        raise _lost(lacking, sources)
    for layer, side in missing:
        chosen[layer, side] = Scale((1.0,), Origin(OriginKind.DEFAULT, "1.0"))
    return (
        f"There is no {lacking}: the FP8 cache is uncalibrated there and uses 1.0, so that values "
        "beyond the format's largest are clipped. Give calibrated scales with kv_scales "
        "(--kv-scales).",
    )


def _lost(lacking: str, sources: ScaleSources) -> ScaleError:
    """Return the refusal to go on without scales that somebody meant to be there."""
    declaration = sources.checkpoint.declaration
    remedy = (
        "They were lost on the way: look for the complete checkpoint, give scales with kv_scales "
        "(--kv-scales)"
    )
    if declaration is not None:
        why = f"The checkpoint declares an FP8 cache with static scales ({declaration.where})"
    elif sources.explicit is not None:
        why, remedy = "kv_scales was given", "Complete them"
    else:
        why = "The checkpoint brings KV cache scales"
    return ScaleError(
        f"{why}, but there is no {lacking}. {remedy}, skip these layers, or accept the "
        "uncalibrated scale 1.0 with missing_scales=default (--missing-scales default)."
    )


def _by_sides(missing: Sequence[tuple[int, Side]]) -> str:
    """Say what is missing: ``"v scale in layer 3 and no k or v scale in layers 5, 7"``."""
    layers: dict[int, str] = {}
    for layer, side in missing:
        layers[layer] = layers.get(layer, "") + side
    groups: dict[str, list[int]] = {}
    for layer, sides in layers.items():
        groups.setdefault(" or ".join(sides), []).append(layer)
    return " and no ".join(f"{sides} scale in {layer_list(n)}" for sides, n in groups.items())


def _inherit(chosen: _Chosen, quantized: Sequence[LayerGeometry]) -> None:
    sides: tuple[Side, ...] = ("k", "v")
    for layer in quantized:
        if not layer.owns_kv:
            origin = Origin(OriginKind.INHERITED, f"layer {layer.kv_source}")
            for side in sides:
                chosen[layer.layer, side] = Scale(chosen[layer.kv_source, side].values, origin)


def _summary(chosen: Mapping[tuple[int, Side], Scale]) -> list[str]:
    messages = []
    calibrated = _calibrated(chosen)
    for kind in OriginKind:
        of_kind = {key: s for key, s in calibrated.items() if s.origin.kind is kind}
        if of_kind:
            first = next(iter(of_kind.values()))
            per = "head" if any(scale.per_head for scale in of_kind.values()) else "tensor"
            where = layer_list(layer for layer, _ in of_kind)
            messages.append(f"k and v scales of {where}: per {per}, from {first.origin}, ...")
    return messages


def _in_wider_format(chosen: Mapping[tuple[int, Side], Scale], sources: ScaleSources) -> list[str]:
    calibrated = _calibrated(chosen)
    explicit = sources.explicit
    if not calibrated or (explicit is not None and explicit.made_for == FP8_E5M2.name):
        return []
    example = next(iter(calibrated.values())).origin
    return [
        f"Scales made for fp8_e4m3 ({example}) are used for fp8_e5m2 as they are: a scale "
        "means the same in both, fp8_e5m2 just clips later and rounds more coarsely."
    ]


def _calibrated(chosen: Mapping[tuple[int, Side], Scale]) -> dict[tuple[int, Side], Scale]:
    return {key: s for key, s in chosen.items() if s.origin.kind is not OriginKind.DEFAULT}
