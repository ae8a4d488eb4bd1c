"""The demo on a tiny model, and its figures against known distributions."""

import math

import pytest
import torch
from tests.command_line import kv8
from tests.engines import run, start_engine, teacher_forced, tokens
from tests.tiny_models import prompt_ids

from kv8.cli.comparison import kl_divergence
from kv8.engine.scoring import prompt_logits
from kv8.errors import RequestError


def test_divergence_of_known_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    kl, same = kl_divergence(p.log() + 3.0, q.log())
    # Logits are float32, so log-probabilities carry errors of some 1e-7.
    assert float(kl) == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2), abs=1e-6)
    assert same.tolist() == [False]
    kl, same = kl_divergence(p.log(), p.log())
    assert float(kl) == 0.0
    assert same.tolist() == [True]


def test_impossible_tokens_count_for_nothing() -> None:
    masked = torch.tensor([[0.0, 0.0, -math.inf]])
    assert float(kl_divergence(masked, torch.zeros(1, 3))[0]) == pytest.approx(math.log(1.5))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_scoring_reads_every_token_through_the_cache(family, tiny_model) -> None:
    engine = start_engine(tiny_model(family), kv_cache_dtype="fp8", max_num_batched_tokens=32)
    ids = prompt_ids(75)
    rows = list(prompt_logits(engine, ids))
    assert [len(row) for row in rows] == [32, 32, 11]
    mine = torch.log_softmax(torch.cat(rows), dim=-1)
    # Chunks change only the order of float32 sums; but torch, which multiplies more rows than
    # these, rounds otherwise, and a code near a tie may become its neighbour.
    assert (mine - teacher_forced(engine, ids, chunks=[64, 11])).abs().max() < 1e-3
    engine.check_invariants()
    greedy = int(mine[-1].argmax())
    assert tokens(run(engine, [ids], max_tokens=1)) == [[greedy]]


def test_scoring_needs_an_idle_engine_and_a_text_that_fits(tiny_model) -> None:
    engine = start_engine(tiny_model(), max_model_len=64)
    for wrong in ([], prompt_ids(65)):
        with pytest.raises(RequestError, match=f"1 to 64 tokens, got {len(wrong)}"):
            next(prompt_logits(engine, wrong))
    assert sum(len(row) for row in prompt_logits(engine, prompt_ids(64))) == 64
    from kv8 import SamplingParams

    engine.add_request("busy", [5], SamplingParams())
    with pytest.raises(RequestError, match="has requests"):
        next(prompt_logits(engine, [5]))


def test_a_broken_off_scoring_frees_its_blocks(tiny_model) -> None:
    engine = start_engine(tiny_model(), max_num_batched_tokens=16)
    rows = prompt_logits(engine, prompt_ids(64))
    next(rows)
    rows.close()
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


@pytest.fixture(scope="module")
def small_demo(tiny_model):
    words = (
        "--model",
        tiny_model(dtype=torch.bfloat16),
        "--max-tokens",
        "6",
        "--text-tokens",
        "96",
    )
    return kv8("demo", *words), kv8("demo", *words, "--json")


def test_demo_figures(small_demo) -> None:
    """Pitfall 41: what an uncalibrated cache costs, by position, against the unquantized one."""
    auto, fp8, e5m2 = small_demo[1].json["runs"]
    assert [entry["dtype"] for entry in (auto, fp8, e5m2)] == ["bfloat16", "fp8_e4m3", "fp8_e5m2"]
    assert auto["tokens_per_gib"] * 2 == fp8["tokens_per_gib"] == e5m2["tokens_per_gib"]
    assert auto["divergence"] is None
    for entry in (fp8, e5m2):
        found = entry["divergence"]
        assert found["num_positions"] == 96
        assert 0 < found["median"] <= found["mean"] * 96
        assert found["mean"] <= found["maximum"]
        assert len(found["by_position"]) == 4
        assert sum(found["by_position"]) / 4 == pytest.approx(found["mean"])
        assert 0 <= found["same_top"] <= 1
        assert entry["kv_cache"]["calibrated"] is False
    # e5m2 keeps one bit less of every value.
    assert fp8["divergence"]["mean"] < e5m2["divergence"]["mean"]
    assert all(len(entry["texts"]) == 3 for entry in (auto, fp8, e5m2))


def test_demo_page(small_demo) -> None:
    page = small_demo[0]
    assert page.code == 0
    for part in (
        "London is the capital of ...",
        "auto (bfloat16)",
        "fp8 (fp8_e4m3)",
        "tokens in 1 GiB",
        "KL divergence, in nats",
        "at 96 positions",
        "layers 0-3: fp8_e5m2; k scale 1 (default)",
        "no calibrated scales",
    ):
        assert part in page.out
    assert "loading" in page.err


def test_demo_says_when_values_are_clipped(tiny_model) -> None:
    """Pitfall 39: a model whose keys do not fit scale 1.0 is not shown as if all were well."""
    model = tiny_model("qwen2", key_bias_layers=(0, 3))
    words = ("--model", model, "--max-tokens", "2", "--text-tokens", "16")
    result = kv8("demo", *words)
    assert result.code == 0
    [line] = [x for x in result.out.splitlines() if x.startswith("fp8 (fp8_e4m3) clipped")]
    assert "Calibrate" in line
