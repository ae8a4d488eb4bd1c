"""Reports and their tables."""

from typing import Any

import pytest

from kv8.bench.conditions import busy_warnings
from kv8.bench.report import Report
from kv8.bench.tables import cells, format_seconds, markdown, text_table
from kv8.bench.timing import Samples

CONDITIONS: dict[str, Any] = {
    "machine": "Some CPU",
    "cores": 2,
    "threads": 2,
    "kv8": "1",
    "torch": "2",
    "transformers": "3",
    "load_before": 0.1,
    "share_of_cpu_taken_by_others": 0.01,
    "seed": 0,
    "command": "kv8 bench something",
}


def make_report() -> Report:
    report = Report("something", "Something.", figures={"fp8_over_bf16": 2.0})
    half = Samples((0.5, 0.4, 0.6))
    report.add({"phase": "decode", "context": 1000}, half, tokens=10, num_bytes=5e9)
    report.add({"phase": "prefill"}, Samples((1e-5,)), flop=1e6, over=("bf16", 2.0))
    report.conditions = CONDITIONS
    return report


def test_rates_are_of_the_median() -> None:
    row = make_report().rows[0]
    assert row["tokens_per_second"] == 20
    assert row["bytes_per_second"] == 1e10
    assert (row["min_seconds"], row["median_seconds"], row["max_seconds"]) == (0.4, 0.5, 0.6)


def test_columns_are_those_that_are_used() -> None:
    headings, lines = cells(make_report().as_json())
    assert headings == [
        "phase", "context", "median", "spread", "tok/s", "GB/s", "GFLOP/s", "over bf16",
    ]  # fmt: skip
    assert lines[0] == ["decode", "1,000", "500 ms", "400 ms to 600 ms", "20.0", "10.0", "", ""]
    assert lines[1][:2] == ["prefill", ""]
    assert lines[1][-1] == "2.00x"


@pytest.mark.parametrize("page", [text_table, markdown])
def test_pages_have_rows_figures_conditions_and_warnings(page: Any) -> None:
    report = make_report()
    report.warnings = ["This machine was busy"]
    text = page(report.as_json())
    for part in ("500 ms", "fp8_over_bf16", "Some CPU, 2 cores", "kv8 bench something", "was busy"):
        assert part in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(123.4, "123 s"), (1.0, "1.00 s"), (0.0125, "12.5 ms"), (3.21e-6, "3.21 µs")],
)
def test_times_read_well(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_busy_machine_is_named() -> None:
    assert busy_warnings(0.1, 0.01, cores=2) == []
    [warning] = busy_warnings(3.0, 0.4, cores=2)
    assert "load average was 3.0 on 2 cores" in warning
    assert "took 40 % of the CPU" in warning
    assert busy_warnings(3.0, 0.0, cores=64) == []
