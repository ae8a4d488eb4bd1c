"""docs/benchmarks.md: its tables are made from the JSON of real runs, so nobody types a figure."""

import json
from pathlib import Path

from kv8.bench.tables import markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- measured: pytest tests/docs --update-golden -->\n"
NAMES = (
    "peers",
    "kernels",
    "latency",
    "throughput",
    "startup",
)  # RESULTS / NAME.json, if it is there


def measured() -> str:
    """Return the part of the page that is made."""
    files = [path for name in NAMES if (path := RESULTS / f"{name}.json").exists()]
    reports = [json.loads(path.read_text()) for path in files]
    sections = [f"### {report['benchmark']}\n\n{markdown(report)}" for report in reports]
    return "\n" + ("\n".join(sections) or "Nothing yet.\n")


def test_the_page_is_current(update_golden: bool) -> None:
    head, begin, tail = PAGE.read_text().partition(BEGIN)
    assert begin
    if update_golden:
        PAGE.write_text(head + begin + measured())
        tail = measured()
    assert tail == measured(), "run: pytest tests/docs --update-golden"


def test_only_known_results_are_kept() -> None:
    known = {f"{name}.json" for name in (*NAMES, "calibration")}  # that has a page of its own
    assert {path.name for path in RESULTS.glob("*")} <= known
