"""An engine's choice of kernels: measured before memory is divided up, shown, and used."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.engines import run, start_engine, tokens
from tests.flash3_stand_in import install
from tests.tiny_models import prompt_ids
from tests.unit.engine.test_gpu_memory import MIB, ScriptedMeter

from kv8.engine.attention_kernels import choose_kernels
from kv8.engine.gpu_memory import MemoryBudget
from kv8.engine.largest_step import build_prompts
from kv8.engine.report import live_report
from kv8.engine.resolve import resolve_options
from kv8.engine.runner import Runner
from kv8.errors import ScaleError
from kv8.options import EngineOptions

TYPES = ["sliding_attention", "full_attention"]
SCALES = {"k": 0.02, "v": 0.02, "q": 0.02}


def clock(work):
    """FlashAttention 3 takes half of triton's time for prompts, and twice as much for decoding."""
    made_up, backend = work.func.__self__, work.args[0]
    if backend.name == "triton":
        return 1e-3
    return 2e-3 if set(made_up.batch.query_lens_host) == {1} else 0.5e-3


@pytest.fixture
def flash3(monkeypatch):
    return install(monkeypatch)


def load(folder, **options):
    """Return a loaded model, and the settings of an engine that would serve it."""
    common = {
        "model": str(folder), "dtype": "bfloat16", "max_model_len": 24, "block_size": 4,
        "max_num_seqs": 2, "max_num_batched_tokens": 12, "enforce_eager": True,
    }  # fmt: skip
    model = start_engine(folder, dtype="bfloat16", attention_backend="reference").runner.model
    return model, resolve_options(EngineOptions(**common | options))


def test_it_is_measured_shown_and_used(tiny_model, flash3, monkeypatch) -> None:
    """By an engine on `auto`, over a model of two kinds of layers, with windows and without."""
    folder = tiny_model("gemma3", num_hidden_layers=2, layer_types=TYPES)
    options = {"dtype": "bfloat16", "block_size": 4, "max_model_len": 12, "max_num_seqs": 2}
    monkeypatch.setattr("kv8.engine.engine.choose_kernels", partial(choose_kernels, timer=clock))
    engine = start_engine(folder, **options)
    settings = live_report(engine.config, engine.runner).as_json()["settings"]
    assert settings["attention_kernels"]["value"] == "flash3 for prompts, triton for decoding"
    for part in (
        "a prompt of 12 tokens and on decoding 2 x 12",
        "1 layer in bfloat16, all tokens: prompts by flash3 (triton 1,000 µs, flash3 500 µs)",
        "1 layer in bfloat16, window 8: prompts by flash3",
        "decoding by triton (triton 1,000 µs, flash3 2,000 µs)",
    ):
        assert part in settings["attention_kernels"]["reason"]
    flash3.clear()
    found = run(engine, [prompt_ids(9)], max_tokens=2, ignore_eos=True)
    assert [call["max_seqlen_q"] for call in flash3] == [9, 9]  # layers; decoding is triton's
    monkeypatch.undo()
    plain = run(start_engine(folder, **options), [prompt_ids(9)], max_tokens=2, ignore_eos=True)
    assert tokens(found) == tokens(plain)


def test_where_there_is_no_choice_nothing_is_measured(tiny_model, flash3) -> None:
    """Without a GPU, or over an FP8 cache without q scales; the settings say why."""
    folder = tiny_model("llama", num_hidden_layers=1)
    model, config = load(folder, kv_cache_memory="1MiB", kv_cache_dtype="fp8")
    assert choose_kernels(model, config) is config
    setting = choose_kernels(model, config, clock).decisions[-1]
    assert (setting.name, setting.value) == ("attention_kernels", "triton")
    assert setting.reason.startswith("1 layer in fp8_e4m3, all tokens: triton: FlashAttention 3")
    assert "needs q scales" in setting.reason
    assert not flash3


def test_memory_is_measured_with_the_kernels_that_were_chosen(tiny_model, flash3) -> None:
    model, config = load(tiny_model("llama"))
    config = choose_kernels(model, config, clock)
    flash3.clear()
    budget = MemoryBudget(ScriptedMeter(graphs=(0, 0)), 100 * MIB, 0.5)
    config = budget.fit_cache(model, config, lambda _: lambda work: work)
    assert {int(call["cu_seqlens_q"][-1]) for call in flash3} == {12}  # the largest step
    assert config.kernel_choice is not None


def test_scales_may_change_what_can_be_chosen(tiny_model, flash3) -> None:
    """FlashAttention 3 takes one q scale for the heads of a KV head; the triton kernels take any.
    Where it was asked for by name, such scales are refused before anything is changed.
    """
    numbers = range(4)
    alike = dict.fromkeys(numbers, SCALES)
    model, config = load(
        tiny_model("llama"), kv_cache_dtype="fp8", kv_scales=alike, kv_cache_memory="1MiB"
    )
    config = choose_kernels(model, config, clock)
    num_heads = config.geometry.layer(0).num_heads
    apart = {layer: SCALES | {"q": [0.01 * (1 + n) for n in range(num_heads)]} for layer in numbers}
    runner, step = Runner(model, config), build_prompts(config, [2], model.device)
    assert runner.layers[0].q_scale is not None
    flash3.clear()
    runner.run(step)
    assert flash3
    flash3.clear()
    runner.set_scales(apart)
    runner.run(step)
    assert not flash3

    asked = replace(config, options=replace(config.options, attention_backend="flash3"))
    by_name = Runner(model, asked)
    with pytest.raises(ScaleError, match=r"layer 0.*one q scale for all query heads of a KV head"):
        by_name.set_scales(apart)
    assert torch.equal(by_name.layers[0].q_scale, torch.full((num_heads,), 0.02))
