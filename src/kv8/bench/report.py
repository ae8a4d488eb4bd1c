"""What a benchmark found: figures, rows and conditions as plain data, for JSON and tables alike."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kv8.bench.roof import Roof
from kv8.bench.timing import Samples

Labels = Mapping[str, str | int]


@dataclass
class Report:
    """One run of one benchmark.

    Attributes:
        benchmark: its name (``latency``).
        title: what was measured, in a sentence.
        figures: the numbers to compare runs by, flat.
        rows: every measurement behind them; `kv8.bench.tables` knows the keys.
        conditions: of `kv8.bench.conditions`.
        warnings: what makes the figures doubtful.
    """

    benchmark: str
    title: str
    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    conditions: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(
        self,
        labels: Labels,
        seconds: Samples,
        *,
        tokens: int | None = None,
        num_bytes: float | None = None,
        flop: float | None = None,
        over: tuple[str, float] | None = None,
    ) -> dict[str, Any]:
        """Add a row and return it.

        Args:
            labels: what was measured.
            seconds: how long it took.
            tokens: how many tokens each sample made.
            num_bytes: how many bytes each sample read, by formula.
            flop: how many operations each sample took, by formula.
            over: another row's name, and how many times as fast as it this one is.
        """
        row: dict[str, Any] = {
            **labels,
            "repeats": len(seconds.values),
            "median_seconds": seconds.median,
            "min_seconds": seconds.least,
            "max_seconds": seconds.most,
        }
        for key, amount in (
            ("tokens_per_second", tokens),
            ("bytes_per_second", num_bytes),
            ("flop_per_second", flop),
        ):
            if amount is not None:
                row[key] = amount / seconds.median
        if over is not None:
            row[f"over_{over[0]}"] = over[1]
        self.rows.append(row)
        return row

    def add_roof(self, roof: Roof) -> None:
        """Add the machine's own speed, and to every row its share of it."""
        for row in self.rows:
            if "bytes_per_second" in row:
                row[f"{roof.way}_bandwidth_share"] = row["bytes_per_second"] / roof.bytes_per_second
            if "flop_per_second" in row:
                row["matmul_share"] = row["flop_per_second"] / roof.flop_per_second
        name = next(iter(self.rows[0]))
        self.add({name: f"{roof.way}ing memory"}, roof.move_seconds, num_bytes=roof.moved_bytes)
        for product, seconds in roof.matmul_seconds.items():
            self.add({name: f"{product} matmul"}, seconds, flop=roof.matmul_flop)
        self.figures[f"{roof.way}_bytes_per_second"] = roof.bytes_per_second
        self.figures["matmul_flop_per_second"] = roof.flop_per_second

    def worst_share(self, key: str, **labels: str | int) -> float | None:
        """Return the smallest share ``key`` of the rows with these labels."""
        found = (row for row in self.rows if key in row and labels.items() <= row.items())
        return min((float(row[key]) for row in found), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return dict(vars(self))
