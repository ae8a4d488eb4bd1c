"""The report's picture: amax and scale of keys, values and queries by layer, every head a line."""

from collections.abc import Sequence
from importlib.util import find_spec
from math import nan
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

from kv8.calibration.report import CalibrationReport
from kv8.calibration.report_side import SideReport
from kv8.calibration.report_warnings import UNSTABLE_CHANGE
from kv8.errors import RequestError
from kv8.scales.scale import Side

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIDES: Final[dict[Side, str]] = {"k": "keys", "v": "values", "q": "queries"}
# Okabe and Ito's colours, which people with colour vision deficiencies can tell apart, without the
# yellow, which is too light on white.
_FEW: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_INK: Final = "#333333"
_GRID: Final = "#dddddd"
_HIGH_BAND: Final = "#d9e2ec"
_TYPE_BAND: Final = "#f6efe2"
_ALARM: Final = "#c1121f"
_DOTS_PER_INCH: Final = 150
_LINE_LENGTH: Final = 140  # characters that fit above the panels


def can_draw() -> bool:
    """Whether matplotlib is installed, which the extra ``kv8[report]`` brings."""
    return find_spec("matplotlib") is not None


def draw_report(report: CalibrationReport, path: Path) -> None:
    """Draw ``report`` on one page and write it to ``path`` as PNG.

    A row of two panels for each side: largest magnitudes and scales, over the layers, on a
    logarithmic axis, a line for each head. Heads that were zero throughout are left out. The same
    report gives the same file, with the same version of matplotlib.

    Raises:
        RequestError: matplotlib is not installed.
    """
    if not can_draw():
        raise RequestError(
            "A picture needs matplotlib, which is not installed: pip install 'kv8[report]'."
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = {side: [row for row in report.rows if row.side == side] for side in _SIDES}
    rows = {side: found for side, found in rows.items() if found}
    figure = Figure(figsize=(12, 1.6 + 3.0 * len(rows)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), 2, squeeze=False, sharex=True)
    for (left, right), (side, found) in zip(axes, rows.items(), strict=True):
        colours = _colours(max(len(row.amax) for row in found))
        _draw_magnitudes(left, found, colours)
        _draw_scales(right, found, colours)
        left.set_ylabel(_SIDES[side], fontsize=13, fontweight="bold", color=_INK)
        _name_heads(right, colours)
    for panel in axes.flat:
        _dress(panel, report)
    for panel in axes[-1]:
        panel.set_xlabel("layer", color=_INK)
    axes[0, 0].set_title("largest magnitude (amax), by head", color=_INK)
    each = "the tensor" if report.conditions.strategy == "tensor" else "each head"
    axes[0, 1].set_title(f"scale of {each} ({report.conditions.kv_format.name})", color=_INK)
    heading = "\n".join(fill(line, _LINE_LENGTH) for line in report.heading().splitlines())
    figure.suptitle(heading, fontsize=11, color=_INK, x=0.01, ha="left")
    _explain(figure, report)
    figure.savefig(path, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})


def _draw_magnitudes(axes: "Axes", rows: Sequence[SideReport], colours: Sequence[Any]) -> None:
    """Draw each head's amax, before a band that spans the heads' 99.9th percentiles."""
    layers = [row.layer for row in rows]
    spans = [[high for high in row.p99_9 if high > 0] or [nan] for row in rows]
    low, high = [min(span) for span in spans], [max(span) for span in spans]
    if max(map(len, spans)) > 1:
        axes.fill_between(layers, low, high, color=_HIGH_BAND, lw=0)
    axes.plot(layers, high, ":", color=_INK, lw=0.8)
    axes.plot(layers, low, ":", color=_INK, lw=0.8)
    _draw_heads(axes, layers, [[x or nan for x in row.amax] for row in rows], colours)


def _draw_scales(axes: "Axes", rows: Sequence[SideReport], colours: Sequence[Any]) -> None:
    """Draw the scales, and a ring around those that the halves of the data disagree about."""
    layers = [row.layer for row in rows]
    values = [_visible_scales(row) for row in rows]
    if max(map(len, values)) < len(colours):
        colours = [_INK]  # one line for all heads is no head's
    _draw_heads(axes, layers, values, colours)
    for row, scales in zip(rows, values, strict=True):
        if row.change is not None and row.change > UNSTABLE_CHANGE:
            axes.plot(row.layer, max(scales), "o", mfc="none", mec=_ALARM, mew=1.4, ms=10)


def _visible_scales(row: SideReport) -> list[float]:
    """Return the scales; NaN for those of nothing but zeros, which are constants far below."""
    silent = [amax == 0 for amax in row.amax]
    if len(row.scale) < len(silent):
        silent = [all(silent)]
    return [nan if zero else scale for zero, scale in zip(silent, row.scale, strict=True)]


def _draw_heads(
    axes: "Axes", layers: Sequence[int], values: Sequence[Sequence[float]], colours: Sequence[Any]
) -> None:
    for head, colour in enumerate(colours):
        # A model may have fewer heads in some layers than in others.
        line = [heads[head] if head < len(heads) else nan for heads in values]
        axes.plot(layers, line, "o-", color=colour, lw=1.0, ms=3.2, alpha=0.9, label=str(head))


def _colours(num_heads: int) -> list[Any]:
    if num_heads <= len(_FEW):
        return list(_FEW[:num_heads])
    from matplotlib import colormaps

    # The lightest fifth of the map is too light on white.
    return list(colormaps["viridis"]([0.8 * head / (num_heads - 1) for head in range(num_heads)]))


def _name_heads(axes: "Axes", colours: Sequence[Any]) -> None:
    """Say beside a row which colour is which head; of many, every n-th."""
    from matplotlib.lines import Line2D

    step = -(-len(colours) // 9)
    keys = [
        Line2D([], [], color=colour, marker="o", ms=4, lw=1, label=f"head {head}")
        for head, colour in enumerate(colours)
        if head % step == 0 or head == len(colours) - 1
    ]
    axes.legend(
        handles=keys, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9
    )


def _dress(axes: "Axes", report: CalibrationReport) -> None:
    """Give a panel its axes: logarithmic with numbers people read, whole layers, light lines."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=_steps_in_a_decade(axes)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.tick_params(labelsize=9, colors=_INK, labelbottom=True)
    axes.grid(True, which="major", color=_GRID, lw=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color(_GRID)
    layers = {row.layer: row.type for row in report.rows}
    if len(set(layers.values())) > 1:
        for layer, type_ in layers.items():
            if type_ == _marked_type(report):
                axes.axvspan(layer - 0.5, layer + 0.5, color=_TYPE_BAND, lw=0, zorder=-1)


def _steps_in_a_decade(axes: "Axes") -> tuple[float, ...]:
    """Return where a decade of the y axis gets numbers: the fewer decades, the more of them."""
    low, high = axes.get_ylim()
    if high / low < 10:
        return (1, 1.5, 2, 3, 4, 5, 7)
    return (1, 2, 5) if high / low < 200 else (1,)


def _marked_type(report: CalibrationReport) -> str:
    """Return the rarest type of layer."""
    types = [type_ for _, type_ in sorted({(row.layer, row.type) for row in report.rows})]
    return min(dict.fromkeys(types), key=types.count)


def _explain(figure: "Figure", report: CalibrationReport) -> None:
    """Say below the panels what their marks mean, as far as they occur."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys: list[Any] = [
        Patch(
            facecolor=_HIGH_BAND,
            edgecolor=_INK,
            ls=":",
            lw=0.8,
            label="99.9 % of a head's values are below (lowest to highest head)",
        ),
    ]
    if any(row.change is not None and row.change > UNSTABLE_CHANGE for row in report.rows):
        text = f"unstable: halves of the data differ by more than {100 * UNSTABLE_CHANGE:.0f} %"
        keys.append(Line2D([], [], ls="", marker="o", mfc="none", mec=_ALARM, ms=9, label=text))
    if len({row.type for row in report.rows}) > 1:
        keys.append(Patch(facecolor=_TYPE_BAND, label=_marked_type(report)))
    figure.legend(
        handles=keys, loc="outside lower left", ncols=len(keys), frameon=False, fontsize=9
    )
