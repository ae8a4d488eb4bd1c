"""The benchmarks run, and say what they measured apart. Nothing here looks at how fast it was."""

import json
import subprocess
import sys
from pathlib import Path

from tests.tiny_models import TinyModel

ROOT = Path(__file__).resolve().parents[2]


def test_prefill_and_decode_are_reported_apart_for_each_dtype(tiny_model: TinyModel) -> None:
    """Pitfall 65: one figure over both phases hides that they move in opposite directions."""
    command = [sys.executable, ROOT / "benchmarks" / "phases.py", str(tiny_model("llama"))]
    options = ["--contexts", "8", "24", "--new-tokens", "4", "--repeats", "1", "--json"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    report = json.loads(result.stdout)
    measured = {(r["phase"], r["context"], r["kv_cache_dtype"]) for r in report["rows"]}
    assert measured == {
        (phase, context, dtype)
        for phase in ("prefill", "decode")
        for context in (8, 24)
        for dtype in ("auto", "fp8")
    }
    assert report["attention_backend"]
    assert all(row["tokens_per_second"]["median"] > 0 for row in report["rows"])
