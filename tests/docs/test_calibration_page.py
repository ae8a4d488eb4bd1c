"""docs/calibration.md: its tables are made from the JSON of a real run; nobody types a figure."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "calibration.md"
RESULT = ROOT / "benchmarks" / "results" / "calibration.json"
BEGIN = "<!-- measured: pytest tests/docs --update-golden -->\n"
DTYPES = ("fp8_e4m3", "fp8_e5m2")


def _way(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["source"], row.get("strategy", ""), row.get("statistic", "")


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| scales from | strategy | statistic | e4m3 | e5m2 |", "|---|---|---|---|---|"]
    ways = dict.fromkeys(map(_way, rows))
    for way in ways:
        cells = {
            row["dtype"]: f"{row['kl']:.4f} ({row['same_top']:.1%})"
            for row in rows
            if _way(row) == way
        }
        lines.append("| " + " | ".join([*way, *(cells.get(dtype, "") for dtype in DTYPES)]) + " |")
    return "\n".join(lines) + "\n"


def measured() -> str:
    if not RESULT.exists():
        return "\nNothing yet.\n"
    report = json.loads(RESULT.read_text())
    facts = report["conditions"]
    parts = [
        f"\n### {model}\n\n{_table(list(rows))}"
        for model, rows in groupby(report["rows"], key=lambda row: row["model"])
    ]
    parts.append(
        f"\nCommand: `python benchmarks/{facts['command']}`; {facts['samples']} samples of "
        f"{facts['max_length']} tokens from each source, judged on {facts['judged_on']} tokens "
        f"(the tiny models on 3 x 100 and 200 random ones); torch {facts['torch']}, transformers "
        f"{facts['transformers']}, {facts['threads']} threads.\n"
    )
    return "".join(parts)


def test_the_page_is_current(update_golden: bool) -> None:
    head, begin, tail = PAGE.read_text().partition(BEGIN)
    assert begin
    if update_golden:
        tail = measured()
        PAGE.write_text(head + begin + tail)
    assert tail == measured(), "run: pytest tests/docs --update-golden"
