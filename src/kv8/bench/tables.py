"""A report's JSON as a table for people: as text, or as Markdown for docs/benchmarks.md."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kv8.engine.table import format_table
from kv8.units import format_bytes

Report = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: its heading, the key of a row it shows, and how a row's entry reads."""

    heading: str
    key: str
    write: Callable[[Row], str]

    def cell(self, row: Row) -> str:
        """Return the entry of ``row``, empty where it has none."""
        return self.write(row) if self.key in row else ""


def format_seconds(seconds: float) -> str:
    """Return a time with about three digits and the unit that fits."""
    if seconds >= 1:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{_digits(seconds * 1e6)} µs"


def _digits(value: float) -> str:
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _billions(key: str) -> Callable[[Row], str]:
    return lambda row: _digits(row[key] / 1e9)


def _percent(key: str) -> Callable[[Row], str]:
    return lambda row: f"{100 * row[key]:.0f} %"


def _label(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:,}" if isinstance(row[key], int) else str(row[key])


def _ratio(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.2f}x"


def _spread(row: Row) -> str:
    return f"{format_seconds(row['min_seconds'])} to {format_seconds(row['max_seconds'])}"


_METRICS: Final = (
    Column("median", "median_seconds", lambda row: format_seconds(row["median_seconds"])),
    Column("spread", "min_seconds", _spread),
    Column("tok/s", "tokens_per_second", lambda row: _digits(row["tokens_per_second"])),
    Column("GB/s", "bytes_per_second", _billions("bytes_per_second")),
    Column("of reading memory", "read_bandwidth_share", _percent("read_bandwidth_share")),
    Column("of copying memory", "copy_bandwidth_share", _percent("copy_bandwidth_share")),
    Column("GFLOP/s", "flop_per_second", _billions("flop_per_second")),
    Column("of matmul", "matmul_share", _percent("matmul_share")),
    Column("peak memory", "peak_bytes", lambda row: format_bytes(int(row["peak_bytes"]))),
)
_HIDDEN: Final = {"repeats", "max_seconds"}  # the one is a condition, the other in the spread
_RATIO: Final = "over_"


def cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return headings and lines of the report's rows: labels, measurements, ratios."""
    rows: Sequence[Row] = report["rows"]
    keys = dict.fromkeys(key for row in rows for key in row if key not in _HIDDEN)
    known = {column.key for column in _METRICS}
    ratios = [key for key in keys if key.startswith(_RATIO)]
    labels = [key for key in keys if key not in known and key not in ratios]
    columns = [
        *(Column(key.replace("_", " "), key, _label(key)) for key in labels),
        *(column for column in _METRICS if column.key in keys),
        *(Column(key.replace("_", " "), key, _ratio(key)) for key in ratios),
    ]
    headings = [column.heading for column in columns]
    return headings, [[column.cell(row) for column in columns] for row in rows]


def _comparisons(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return headings and lines of a report's comparisons with goals, if it has any."""
    rows: Sequence[Row] = report.get("comparisons", ())
    headings = list(rows[0]) if rows else []
    return headings, [[str(row[key]) for key in headings] for row in rows]


def conditions_line(report: Report) -> str:
    """Return the conditions in a sentence."""
    seen = report["conditions"]
    versions = ", ".join(f"{name} {seen[name]}" for name in ("kv8", "torch", "transformers"))
    gpu = [f"{seen['gpu']}, CUDA {seen['cuda']}, triton {seen['triton']}"] if "gpu" in seen else []
    facts = [
        *gpu,
        f"{seen['machine']}, {seen['cores']} cores, {seen['threads']} threads",
        versions,
        f"load average {seen['load_before']:.1f} before",
        f"{100 * seen['share_of_cpu_taken_by_others']:.0f} % of the CPU taken by others meanwhile",
        f"seed {seen['seed']}",
    ]
    return "; ".join(facts)


def text_table(report: Report) -> str:
    """Return the report for a terminal."""
    figures = [[name, f"{value:,.4g}"] for name, value in report["figures"].items()]
    tables = (_comparisons(report), cells(report), (["figure", ""], figures))
    parts = [report["title"], *(format_table(*table) for table in tables if table[1])]
    parts += [f"{conditions_line(report)}\n{report['conditions']['command']}"]
    parts += [f"WARNING: {warning}" for warning in report["warnings"]]
    return "\n\n".join(parts)


def markdown(report: Report) -> str:
    """Return the report as Markdown, for a page."""
    figures = [[f"`{name}`", f"{value:,.4g}"] for name, value in report["figures"].items()]
    tables = (_comparisons(report), cells(report), (["figure", "value"], figures))
    parts = [
        report["title"],
        *(_markdown_table(*table) for table in tables if table[1]),
        f"{conditions_line(report)}.\nCommand: `{report['conditions']['command']}`",
        *(f"**{warning}**" for warning in report["warnings"]),
    ]
    return "\n\n".join(parts) + "\n"


def _markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    table = [headings, ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in table)
