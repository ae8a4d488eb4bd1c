"""The benchmarks run, and say what they measured apart. Nothing here looks at how fast it was."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.command_line import kv8
from tests.tiny_models import TinyModel

from kv8.bench import startup

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers.py"
SMALL = ("--steps", "2", "--repeats", "2")


def check(report: dict[str, Any], *names: str) -> None:
    """Every report has the same parts, and figures are numbers."""
    assert set(report) == {"benchmark", "title", "figures", "rows", "conditions", "warnings"}
    for name in names:
        assert name in report["figures"]
    assert all(math.isfinite(value) and value > 0 for value in report["figures"].values())
    assert all(row["median_seconds"] > 0 for row in report["rows"] if "median_seconds" in row)
    seen = report["conditions"]
    for name in ("command", "machine", "cores", "threads", "python", "kv8", "torch", "seed"):
        assert seen[name] is not None
    assert seen["seconds"] > 0
    assert 0 <= seen["share_of_cpu_taken_by_others"] <= 1


def test_prefill_and_decode_are_reported_apart_for_each_dtype(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pitfall 65: one figure over both phases hides that they move in opposite directions."""
    started = []

    def run_cold(options: Mapping[str, Any], prompt_tokens: int) -> startup.ColdRun:
        started.append((options["kv_cache_dtype"], prompt_tokens, options["max_model_len"]))
        peak = {"bfloat16": 400, "fp8": 300}[options["kv_cache_dtype"]]
        return startup.ColdRun(1.0, {}, start_peak_bytes=1, prefill_peak_bytes=peak)

    monkeypatch.setattr(startup, "run_cold", run_cold)
    words = (tiny_model("llama"), "--contexts", 8, 24, "--dtypes", "bfloat16", "fp8", *SMALL)
    report = kv8("bench", "latency", *words, "--json").json
    check(
        report,
        "prefill_fp8_over_bf16",
        "decode_fp8_over_bf16",
        "decode_fp8_read_bandwidth_share",
        "prefill_fp8_matmul_share",
        "prefill_peak_memory_fp8_over_bf16",
        "read_bytes_per_second",
        "matmul_flop_per_second",
    )
    assert started == [("bfloat16", 511, 512), ("fp8", 511, 512)] * 2  # processes, in turns
    assert report["figures"]["prefill_peak_memory_fp8_over_bf16"] == 0.75
    timed = [row for row in report["rows"] if "kv_cache_dtype" in row and "repeats" in row]
    measured = {(r["phase"], r["context"], r["kv_cache_dtype"]) for r in timed}
    assert measured == {
        (phase, context, dtype)
        for phase in ("prefill", "decode")
        for context in (8, 24)
        for dtype in ("bfloat16", "fp8")
    } | {("memory of prefill", 511, dtype) for dtype in ("bfloat16", "fp8")}
    assert report["conditions"]["attention_backend"]
    assert report["conditions"]["model"] == str(tiny_model("llama"))


def test_throughput_runs_requests_together_and_prints_a_table(tiny_model: TinyModel) -> None:
    words = (tiny_model("gemma3"), "--workloads", "3x8", "2x20", *SMALL)
    result = kv8("bench", "throughput", *words)
    assert result.code == 0, result.err
    rows = [line.split() for line in result.out.splitlines() if line.startswith(("prefill", "dec"))]
    named = [row[:4] for row in rows if len(row) > 4]
    assert named == [
        [phase, sequences, context, dtype]
        for sequences, context in (("3", "8"), ("2", "20"))
        for phase in ("prefill", "decode")
        for dtype in ("bfloat16", "fp8")
    ]
    assert "prefill_fp8_over_bf16" in result.out
    assert "of reading memory" in result.out


def test_a_mixture_of_experts_has_speeds_but_no_shares(tiny_model: TinyModel) -> None:
    """Which experts a step reads depends on its tokens, so no formula says how many bytes."""
    words = (tiny_model("qwen3_moe"), "--workloads", "2x8", *SMALL, "--json")
    report = kv8("bench", "throughput", *words).json
    check(report, "prefill_fp8_over_bf16", "decode_fp8_over_bf16")
    phases = [row for row in report["rows"] if row["phase"] in ("prefill", "decode")]
    assert all("tokens_per_second" in row for row in phases)
    assert not any("read_bandwidth_share" in row or "matmul_share" in row for row in phases)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_kernels(backend: str) -> None:
    words = ("--tokens", 512, "--layers", 2, "--contexts", 40, 100, "--repeats", 1)
    shape = ("--heads", 4, "--kv-heads", 2, "--head-dim", 16, "--attention-backend", backend)
    report = kv8("bench", "kernels", *words, *shape, "--json").json
    check(
        report,
        "decode_attention_fp8_over_bf16",
        "decode_attention_fp8_bandwidth_share",
        "prefill_fp8_over_bf16",
        "in_turns_over_apart",
    )
    decoded = [row for row in report["rows"] if row["kernel"] == "decode attention"]
    assert {(r["sequences"], r["context"], r["format"]) for r in decoded} == {
        (sequences, 512 // sequences, name)
        for sequences in (1, 8, 64)
        for name in ("bfloat16", "fp8_e4m3")
    }


def test_startup_is_timed_part_by_part(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cold, runs = startup.run_cold, []

    def noting(*arguments: Any) -> startup.ColdRun:
        runs.append(run_cold(*arguments))
        return runs[-1]

    monkeypatch.setattr(startup, "run_cold", noting)
    report = kv8("bench", "startup", tiny_model(), "--repeats", 1, "--json").json
    check(report, "startup_seconds", "help_seconds")
    seconds = {row["phase"]: row["median_seconds"] for row in report["rows"]}
    whole = seconds.pop("all: ready, with a first token")
    del seconds["kv8 --help"]
    assert {"imports", "load weights", "verify model", "warm up", "first token"} < set(seconds)
    assert sum(seconds.values()) == pytest.approx(whole)
    assert len(runs) == 2  # the first is left out
    assert report["figures"]["start_peak_bytes"] == runs[1].start_peak_bytes
    assert all(run.start_peak_bytes > 0 < run.prefill_peak_bytes for run in runs)


def test_markdown_is_a_page_with_conditions() -> None:
    words = ("--tokens", 64, "--layers", 1, "--contexts", 8, "--repeats", 1, "--markdown")
    page = kv8("bench", "kernels", *words).out
    assert "| decode attention | 1 | 64 | fp8_e4m3 |" in page
    assert "| `decode_attention_fp8_over_bf16` |" in page
    assert f"Command: `kv8 bench kernels {' '.join(map(str, words))}`" in page


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("throughput", "{model}", "--workloads", "3by8"), "'3by8' is not known"),
        (("throughput", "{model}", "--workloads", "0x8"), "'0x8' is not known"),
        (("latency", "{model}", "--contexts", "9999"), "at most 512"),
        (("latency", "{model}", "--dtypes", "int4"), "int4"),
        (("kernels", "--heads", "9", "--kv-heads", "2"), "no multiple"),
        (("kernels", "--attention-backend", "magic"), "magic"),
        (("startup", "{model}/nowhere"), "nowhere"),
    ],
)
def test_refusals(words: tuple[str, ...], part: str, tiny_model: TinyModel) -> None:
    result = kv8("bench", *(word.format(model=tiny_model()) for word in words))
    assert result.code != 0
    assert part in result.err
    assert "bug" not in result.err


def peers(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PEERS, *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def test_peers_run_the_same_workload_in_alternation(tiny_model: TinyModel) -> None:
    words = ("--model", tiny_model("llama"), "--engines", "kv8", "transformers", "--threads", 1)
    small = ("--workloads", "1x8p", "2x16", "--steps", 2, "--repeats", 1, "--starts", 1)
    result = peers(*words, *small, "--memory-context", 0, "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    timed = [row for row in report["rows"] if row["phase"] in ("prefill", "decode")]
    measured = {(r["phase"], r["sequences"], r["context"], r["engine"]) for r in timed}
    assert measured == {
        (phase, sequences, context, engine)
        for phase, sequences, context in (("prefill", 1, 8), ("decode", 1, 8), ("decode", 2, 16))
        for engine in ("kv8 bf16", "kv8 fp8", "transformers bf16")
    }
    assert all(row["tokens_per_second"] > 0 for row in timed)
    assert {row["engine"] for row in report["rows"] if row["phase"] == "first start"} == {
        "kv8 bf16",
        "kv8 fp8",
        "transformers bf16",
    }
    assert report["conditions"]["version of kv8"]
