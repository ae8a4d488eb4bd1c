"""The table of a calibration's report: a line for each side of each layer."""

from collections.abc import Mapping, Sequence

from kv8.calibration.report_side import SideReport
from kv8.engine.layer_table import format_share
from kv8.engine.table import format_table

_HEADINGS = (
    "layer", "type", "", "amax", "p99.9", "scale", "halves differ",
    "saturated", "underflowed", "error",
)  # fmt: skip


def layer_table(rows: Sequence[SideReport], reads: Mapping[int, int]) -> str:
    """Return the table of ``rows``; of several heads' values, the smallest and the largest.

    ``reads`` names the layers that read another's keys and values, and that other.
    """
    lines, before = [], None
    for row in rows:
        source = reads.get(row.layer)
        kind = row.type if source is None else f"{row.type} (reads layer {source})"
        start = ("", "") if row.layer == before else (str(row.layer), kind)
        lines.append((*start, row.side, *_figures(row)))
        before = row.layer
    return format_table(_HEADINGS, lines)


def _figures(row: SideReport) -> tuple[str, ...]:
    shares = (row.change, row.saturated_share, row.underflowed_share, row.error)
    return (
        *(_span(values) for values in (row.amax, row.p99_9, row.scale)),
        *("" if share is None else format_share(share) for share in shares),
    )


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low}..{high}"
