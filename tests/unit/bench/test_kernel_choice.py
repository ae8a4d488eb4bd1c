"""Benchmarks measure what an engine would use: the kernels that `auto` chooses."""

import time

import pytest
import torch
from benchmarks.gpu import kernel_table
from benchmarks.gpu.sections import Context
from tests.flash3_stand_in import install

from kv8.attention.kernel_choice import KernelChoice, KindChoice, Race, kind_of
from kv8.bench.attention_work import Shape
from kv8.bench.kernels import KernelBench

PROMPTS_BY_FLASH3 = KindChoice(Race(triton=2.0, flash3=1.0), Race(triton=1.0, flash3=2.0))


@pytest.fixture
def flash3(monkeypatch):
    """Return FlashAttention 3's calls; where it serves, it is said to be faster for prompts."""
    calls = install(monkeypatch)
    from kv8.attention.measured import MeasuredBackend

    def measure(self, subjects, work, dtype, timer=None):
        assert dtype is torch.bfloat16
        assert timer is None  # the device's own clock
        kinds = {kind_of(*subject) for subject in subjects}
        return KernelChoice(
            {
                kind: KindChoice(problem="no q scales")
                if kind.format == "fp8_e4m3" and not kind.fp8_attention
                else PROMPTS_BY_FLASH3
                for kind in kinds
            }
        )

    monkeypatch.setattr(MeasuredBackend, "measure", measure)
    return calls


def test_kv8_bench_kernels_uses_and_reports_what_auto_chooses(flash3, monkeypatch) -> None:
    monkeypatch.setattr(KernelBench, "_check", lambda bench: None)  # 700 tokens, interpreted
    bench = KernelBench(Shape(2, 1, 32, 1), "auto", repeats=1)
    assert bench.kernels == {
        "bfloat16, all tokens": str(PROMPTS_BY_FLASH3),
        "fp8_e4m3, all tokens": "triton: no q scales",
    }
    bench.prefill([8])
    assert {call["k_cache"].dtype for call in flash3} == {torch.bfloat16}


def test_the_table_of_prompts_holds_what_auto_chooses_to_the_goal(flash3, monkeypatch) -> None:
    monkeypatch.setattr(kernel_table.importlib.util, "find_spec", lambda name: name)
    rows = kernel_table._prefill(Context(torch.device("cpu"), True, time.monotonic() + 60), 8)
    goals = {row["what"]: row.get("goal") for row in rows}
    assert goals == {
        "prefill 8 causal, bf16, triton": None,
        "prefill 8 causal, bf16, flash3": 400,
        "prefill 8 causal, bf16: what auto chose over FlashAttention 3": 0.97,
        "prefill 8 causal, e4m3, triton": None,
        "prefill 8 causal, e4m3, FP8 attention, triton": None,
        "prefill 8 causal, e4m3, FP8 attention, flash3": 500,
        "prefill 8 causal, e4m3, FP8 attention, triton, values as codes": None,
        "prefill 8 causal, e4m3, FP8 attention: what auto chose over FlashAttention 3": 0.97,
    }
    [note] = [row["note"] for row in rows if row["what"] == "prefill 8 causal, bf16, flash3"]
    assert "prompts by flash3" in note
