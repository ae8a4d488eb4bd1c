"""The layer table as text: in full, and in short."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from kv8.engine.layer_report import LayerReport
from kv8.engine.table import format_table
from kv8.scales.scale import SIDES, Scale

_HEADINGS = (
    "layer", "type", "dtype", "bytes/token", "", "scale", "origin", "saturated", "underflowed",
)  # fmt: skip


def layer_table(layers: Sequence[LayerReport]) -> str:
    """Return the table of ``layers``, a line for each side that has something of its own to say."""
    return format_table(_HEADINGS, [row for layer in layers for row in _rows(layer)])


def layer_summary(layers: Sequence[LayerReport]) -> str:
    """Return one line for each run of layers that are alike."""
    return "\n".join(_summary_line(list(run)) for _, run in groupby(layers, key=_kind))


def _rows(layer: LayerReport) -> list[tuple[str, ...]]:
    """Return the layer's lines: one a side, or one for all where there is nothing to tell apart."""
    note = ""
    if layer.skipped_by is not None:
        note = f"skipped by {layer.skipped_by}"
    elif layer.reads_layer is not None:
        note = f"reads layer {layer.reads_layer}"
    start = (str(layer.layer), layer.type, layer.dtype, f"{layer.bytes_per_token:,}")
    lines: list[tuple[str, ...]] = []
    for side in SIDES:
        scale, counts = layer.scale(side), layer.counts(side)
        if scale is None:
            continue
        lost = ("", "")
        if counts is not None:
            lost = (format_share(counts.saturated_share), format_share(counts.underflowed_share))
        origin = str(scale.origin) if not note else f"{scale.origin} ({note})"
        if lines and (lines[-1][-4], lines[-1][-3], *lost) == (_text(scale), origin, "", ""):
            lines[-1] = (*lines[-1][:-5], f"{lines[-1][-5]} {side}", *lines[-1][-4:])
            continue
        lines.append((*(start if not lines else ("",) * 4), side, _text(scale), origin, *lost))
    return lines or [(*start, "", "", note, "", "")]


def _text(scale: Scale) -> str:
    if not scale.per_head:
        return f"{scale.values[0]:.6g}"
    return f"{min(scale.values):.4g}..{max(scale.values):.4g} ({len(scale.values)} heads)"


def format_share(share: float) -> str:
    """Return a share as a percentage of two digits; 0 only for none at all."""
    percent = 100 * share
    if percent >= 10:  # two digits, and never 1e+02
        return f"{percent:.0f} %"
    return "0" if share == 0 else f"{percent:.2g} %"


def _kind(layer: LayerReport) -> tuple[Any, ...]:
    origins = tuple(
        None if (scale := layer.scale(side)) is None else (scale.origin.kind, scale.per_head)
        for side in SIDES
    )
    return (layer.dtype, layer.skipped_by, layer.reads_layer is not None, origins)


def _summary_line(alike: list[LayerReport]) -> str:
    first, last = alike[0], alike[-1]
    numbers = f"layer {first.layer}" if len(alike) == 1 else f"layers {first.layer}-{last.layer}"
    parts = [f"{numbers}: {first.dtype}"]
    if first.skipped_by is not None:
        parts.append(f"skipped by {first.skipped_by}")
    if first.reads_layer is not None:
        parts.append("keys and values of other layers")
    for side in SIDES:
        scales = [scale for layer in alike if (scale := layer.scale(side)) is not None]
        if not scales:
            continue
        values = [value for scale in scales for value in scale.values]
        low, high = f"{min(values):.4g}", f"{max(values):.4g}"
        spread = low if low == high else f"{low}..{high}"
        parts.append(f"{side} scale {spread} ({scales[0].origin.kind.value})")
    for name, share in (("saturated", "saturated_share"), ("underflowed", "underflowed_share")):
        sides = [
            f"{side} {format_share(max(getattr(c, share) for c in counts))}"
            for side in ("k", "v")
            if (counts := [c for layer in alike if (c := layer.counts(side)) is not None])
        ]
        if sides:
            parts.append(f"{name} at most " + ", ".join(sides))
    return "; ".join(parts)
