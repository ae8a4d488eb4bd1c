"""One engine over its life: repeats, updates, failures, aborts, crowds, and a neighbour."""

import logging

import pytest
import torch
from tests.engines import finish, run, start_engine, teacher_forced, tokens
from tests.tiny_models import EOS, prompt_ids

from kv8.engine.engine import Engine
from kv8.engine.runner import ScaleStatus
from kv8.errors import CapacityError, RequestError, ScaleError
from kv8.options import EngineOptions
from kv8.sampling_params import SamplingParams

SCALES = {layer: {"k": 0.02, "v": 0.02} for layer in range(4)}
OTHER_SCALES = {layer: {"k": 0.5, "v": 0.5} for layer in range(4)}


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_repeats_and_shared_prefixes_are_served_from_the_cache(kv_cache_dtype, tiny_model) -> None:
    """Pitfalls 50, 55: fp8 and prefix reuse together, the repeat as good as the first."""
    engine = start_engine(tiny_model("llama"), kv_cache_dtype=kv_cache_dtype, kv_scales=SCALES)
    settings = {decision.name: decision.value for decision in engine.config.decisions}
    assert settings["kv_cache_dtype"] == kv_cache_dtype
    assert settings["enable_prefix_caching"] == "on"
    prompt = prompt_ids(40, seed=1)
    answers = [run(engine, [prompt], max_tokens=6)[0] for _ in range(3)]
    relative = run(engine, [prompt[:33] + prompt_ids(7, seed=2)], max_tokens=6)[0]
    assert [answer.num_cached_tokens for answer in answers] == [0, 32, 32]
    assert relative.num_cached_tokens == 32
    assert tokens(answers[1:]) == tokens(answers[:1]) * 2
    assert relative.outputs[0].finish_reason == "length"


def test_without_prefix_caching_nothing_is_found_again(tiny_model) -> None:
    engine = start_engine(tiny_model("llama"), kv_cache_dtype="fp8", enable_prefix_caching=False)
    settings = {decision.name: decision.value for decision in engine.config.decisions}
    assert settings["enable_prefix_caching"] == "off"
    prompt = prompt_ids(40, seed=1)
    answers = [run(engine, [prompt], max_tokens=6)[0] for _ in range(2)]
    assert [answer.num_cached_tokens for answer in answers] == [0, 0]
    assert tokens(answers[1:]) == tokens(answers[:1])
    assert engine.cache.num_cached_blocks == 0


def test_a_rolled_back_prompt_equals_a_fresh_run(tiny_model) -> None:
    """Pitfall 66: 40 tokens, back 7, 7 others: as if the first 7 had never been; options intact."""
    options = EngineOptions(
        model=str(tiny_model("llama")), kv_cache_dtype="fp8", kv_scales=SCALES,
        kv_cache_memory="2MiB", block_size=1,
    )  # fmt: skip
    before = repr(options)
    warm, fresh = Engine(options, check_invariants=True), Engine(options, check_invariants=True)
    first = prompt_ids(40, seed=1)
    other = first[:33] + prompt_ids(7, seed=2)
    run(warm, [first])
    ask = {"max_tokens": 8, "logprobs": 5}
    reused, cold = run(warm, [other], **ask)[0], run(fresh, [other], **ask)[0]
    assert reused.num_cached_tokens == 33
    assert cold.num_cached_tokens == 0
    assert tokens([reused]) == tokens([cold])
    assert repr(options) == before


def test_new_scales_reach_the_next_request_and_empty_the_cache(tiny_model) -> None:
    """Pitfalls 48, 54: scales change in place; nothing stored under the old ones is found."""
    engine = start_engine(tiny_model("llama"), kv_cache_dtype="fp8", kv_scales=SCALES)
    prompt = prompt_ids(40, seed=1)
    addresses = [layer.k_scale.data_ptr() for layer in engine.runner.layers.values()]
    run(engine, [prompt])
    before = teacher_forced(engine, prompt, chunks=[40])
    key = engine.runner.cache_key()
    engine.set_scales(OTHER_SCALES)
    assert engine.runner.cache_key() != key
    assert [layer.k_scale.data_ptr() for layer in engine.runner.layers.values()] == addresses
    assert run(engine, [prompt])[0].num_cached_tokens == 0
    after = teacher_forced(engine, prompt, chunks=[40])
    fresh = start_engine(tiny_model("llama"), kv_cache_dtype="fp8", kv_scales=OTHER_SCALES)
    assert torch.equal(after, teacher_forced(fresh, prompt, chunks=[40]))
    assert not torch.equal(after, before)


@pytest.mark.parametrize(
    "change",
    [
        {"kv_scales": OTHER_SCALES},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype_skip_layers": "0"},
        {"query_dtype": "fp8", "missing_scales": "default"},
        {"model": "gemma3", "kv_scales": {n: {"k": 0.02, "v": 0.02} for n in range(4)}},
    ],
)
def test_blocks_are_found_only_by_engines_that_would_store_the_same(change, tiny_model) -> None:
    """Pitfall 48: model, formats, scales and query format are all part of the digests' key."""
    options = {"model": "llama", "kv_cache_dtype": "fp8", "kv_scales": SCALES}

    def key(**options) -> bytes:
        folder = tiny_model(options.pop("model"))
        return start_engine(folder, **options).runner.cache_key()

    assert key(**options) == key(**options)
    assert key(**options) != key(**{**options, **change})


def test_scales_may_change_while_requests_run(tiny_model) -> None:
    engine = start_engine(tiny_model("llama"), kv_cache_dtype="fp8", kv_scales=SCALES)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    engine.add_request("0", prompt_ids(20), params)
    for _ in range(4):
        engine.step()
    engine.set_scales(OTHER_SCALES)
    output = finish(engine)[0]
    assert len(output.outputs[0].token_ids) == 10
    assert engine.num_preemptions == 1


def test_bad_scales_change_nothing(tiny_model) -> None:
    engine = start_engine(tiny_model("llama"), kv_cache_dtype="fp8", kv_scales=SCALES)
    key = engine.runner.cache_key()
    for bad in ({0: {"k": 0.0, "v": 1.0}}, {99: {"k": 1.0}}, {0: {"k": 0.5, "v": 0.5}}):
        with pytest.raises(ScaleError):
            engine.set_scales(bad)
    assert engine.runner.cache_key() == key


def test_new_scales_do_not_switch_fp8_attention_on_or_off(tiny_model, caplog) -> None:
    """Pitfalls 25, 54: new q scales are in effect at once; 1.0 in their place is never silent."""
    with_q = {layer: {**sides, "q": 0.02} for layer, sides in SCALES.items()}
    other_q = {layer: {**sides, "q": 0.5} for layer, sides in SCALES.items()}
    ids = prompt_ids(20)
    native = start_engine(tiny_model("llama"), kv_cache_dtype="fp8", kv_scales=SCALES)
    before = teacher_forced(native, ids, chunks=[20])
    native.set_scales(with_q)
    assert torch.equal(teacher_forced(native, ids, chunks=[20]), before)

    quantized = start_engine(tiny_model("llama"), kv_cache_dtype="fp8", kv_scales=with_q)
    before, key = teacher_forced(quantized, ids, chunks=[20]), quantized.runner.cache_key()
    quantized.set_scales(other_q)
    assert quantized.runner.cache_key() != key
    assert not torch.equal(teacher_forced(quantized, ids, chunks=[20]), before)
    assert "q scale" not in caplog.text
    quantized.set_scales(SCALES)
    assert "with the uncalibrated q scale 1.0 in layers 0-3" in caplog.text


def test_weights_without_scales_make_the_scales_stale(tiny_model, caplog) -> None:
    """Pitfalls 47, 48: four times larger weights; old scales are called stale, new ones used."""
    engine = start_engine(tiny_model("llama"), kv_cache_dtype="fp8", kv_scales=SCALES)
    assert engine.scale_status is ScaleStatus.CALIBRATED
    prompt = prompt_ids(40, seed=1)
    run(engine, [prompt])
    name = "model.layers.1.self_attn.k_proj.weight"
    weights = {name: 4 * engine.runner.model.module.state_dict()[name]}
    engine.update_weights(weights)
    assert engine.scale_status is ScaleStatus.STALE
    assert "stale" in caplog.text
    assert run(engine, [prompt])[0].num_cached_tokens == 0
    before = teacher_forced(engine, prompt, chunks=[40])
    engine.update_weights(weights, kv_scales=OTHER_SCALES)
    assert engine.scale_status is ScaleStatus.CALIBRATED
    assert run(engine, [prompt])[0].num_cached_tokens == 0
    assert not torch.equal(teacher_forced(engine, prompt, chunks=[40]), before)


def test_weights_that_do_not_belong_are_refused(tiny_model) -> None:
    engine = start_engine(tiny_model("llama"))
    with pytest.raises(RequestError, match="nonsense is not a weight"):
        engine.update_weights({"nonsense": torch.zeros(1)})
    with pytest.raises(RequestError, match=r"has shape \[3\], the model's has \[260, 64\]"):
        engine.update_weights({"lm_head.weight": torch.zeros(3)})
    assert engine.scale_status is ScaleStatus.NOT_NEEDED


def test_two_engines_do_not_know_of_each_other(tiny_model) -> None:
    one = start_engine(tiny_model("llama"), kv_cache_dtype="fp8", kv_scales=SCALES)
    other = start_engine(tiny_model("gemma3"), block_size=4)
    alone = [
        tokens(run(start_engine(tiny_model("llama"), kv_cache_dtype="fp8", kv_scales=SCALES), p))
        for p in ([prompt_ids(30)],)
    ]
    params = SamplingParams(temperature=0, max_tokens=16)
    one.add_request("0", prompt_ids(30), params)
    other.add_request("0", prompt_ids(30), params)
    outputs = {}
    while one.has_unfinished or other.has_unfinished:  # step by step in turn
        for engine in (one, other):
            outputs |= {id(engine): output for output in engine.step()}
    assert [outputs[id(one)].outputs[0].token_ids] == alone[0]
    assert outputs[id(other)].finished


def test_a_failing_step_ends_its_requests_and_spares_the_others(tiny_model, caplog) -> None:
    engine = start_engine(tiny_model("llama"), max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for number in range(4):
        engine.add_request(str(number), prompt_ids(20, seed=number), params)
    engine.step()
    real, calls = engine.runner.run, []

    def fail_once(step):
        calls.append(step)
        if len(calls) == 1:
            raise RuntimeError("the device fell off")
        return real(step)

    engine.runner.run = fail_once
    outputs = finish(engine)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "error", "length", "length"]
    assert outputs[0].outputs[0].error == "RuntimeError: the device fell off"
    assert "the device fell off" in caplog.text
    assert "Traceback" not in caplog.text
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
    assert engine.counters.failed_steps == 1
    assert engine.counters.finished == {"error": 2, "length": 2}


def test_an_interrupt_leaves_the_engine_in_order(tiny_model, caplog) -> None:
    engine = start_engine(tiny_model("llama"))
    params = SamplingParams(temperature=0, max_tokens=4)
    engine.add_request("0", prompt_ids(20), params)
    real = engine.runner.run

    def interrupt(step):
        real(step)
        raise KeyboardInterrupt

    engine.runner.run = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.runner.run = real
    assert "A step failed" not in caplog.text  # nothing did
    assert not engine.has_unfinished
    engine.check_invariants()
    assert run(engine, [prompt_ids(20)])[0].outputs[0].finish_reason in ("length", "stop")


def test_one_sequence_without_sound_logits_ends_alone(tiny_model) -> None:
    engine = start_engine(tiny_model("llama"))
    real = engine.runner.run

    def poison(step):
        logits = real(step).clone()
        logits[0] = float("nan")
        return logits

    engine.runner.run = poison
    outputs = run(engine, [prompt_ids(5), prompt_ids(6), prompt_ids(7)], max_tokens=1)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length", "length"]
    assert "finite" in outputs[0].outputs[0].error


def test_a_failing_detokenizer_ends_only_its_own_request(tiny_model, monkeypatch) -> None:
    engine = start_engine(tiny_model("llama"))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for number in range(2):
        engine.add_request(str(number), prompt_ids(9, seed=number), params)
    _, completion = engine._roster.find(engine.scheduler.waiting[0])
    monkeypatch.setattr(completion._text, "append", lambda token: 1 / 0)
    outputs = finish(engine)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length"]


def test_abort_ends_a_request_wherever_it_stands(tiny_model) -> None:
    engine = start_engine(tiny_model("llama"), max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=50, n=2, ignore_eos=True)
    engine.add_request("running", prompt_ids(20), params)
    engine.add_request("waiting", prompt_ids(20, seed=1), params)
    for _ in range(5):
        engine.step()
    running, waiting = engine.abort("running"), engine.abort("waiting")
    assert running.finished
    assert [c.finish_reason for c in running.outputs] == ["abort", "abort"]
    assert len(running.outputs[0].token_ids) == 5
    assert waiting.outputs[0].token_ids == []
    assert engine.abort("running") is None
    assert engine.abort("never seen") is None
    assert not engine.has_unfinished
    engine.check_invariants()
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_every_request_ends_with_a_reason(tiny_model) -> None:
    engine = start_engine(tiny_model("llama"), max_model_len=32)
    free_run = run(engine, [prompt_ids(20)], max_tokens=None, ignore_eos=True)[0].outputs[0]
    assert free_run.finish_reason == "length"
    assert len(free_run.token_ids) == 12  # as many as fit
    third = free_run.token_ids[2]
    stopped = run(engine, [prompt_ids(20)], stop_token_ids=[third], max_tokens=None)[0].outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", third)
    assert EOS in engine._intake._context.end_token_ids


def test_impossible_requests_are_refused_with_what_would_do(tiny_model) -> None:
    engine = start_engine(tiny_model("llama"), max_model_len=32)
    params = SamplingParams(temperature=0, max_tokens=4)
    for prompt, message in (
        ([], "empty"),
        ([1, 260], "tokens are 0 to 259"),
        ([-1], "holds token -1"),
        (["a"], "must be integers"),
        ([1.5], "must be integers"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request("0", prompt, params)
    with pytest.raises(CapacityError, match="A prompt of 31 tokens or less fits"):
        engine.add_request("0", prompt_ids(32), params)
    with pytest.raises(CapacityError, match="A prompt of 29 tokens or less fits"):
        engine.add_request("0", prompt_ids(30), SamplingParams(max_tokens=4, min_tokens=3))
    engine.add_request("0", prompt_ids(31), params)
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("0", prompt_ids(5), params)
    assert len(finish(engine)[0].outputs[0].token_ids) == 1
    engine.add_request("0", prompt_ids(5), params)  # the name is free again


def test_samples_of_one_prompt_share_it_and_follow_their_own_seeds(tiny_model) -> None:
    engine = start_engine(tiny_model("llama"))
    ask = {"n": 4, "temperature": 1.0, "seed": 3, "max_tokens": 8}
    output = run(engine, [prompt_ids(40)], **ask)[0]
    texts = [tuple(completion.token_ids) for completion in output.outputs]
    assert len(set(texts)) == 4
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert engine.cache.stats.hit_tokens == 3 * 32  # computed once, found three times
    tight = start_engine(tiny_model("llama"), max_num_batched_tokens=3, enable_prefix_caching=False)
    again = run(tight, [prompt_ids(40)], **ask)[0]
    assert [tuple(completion.token_ids) for completion in again.outputs] == texts


def test_ten_thousand_prompts_at_once(tiny_model) -> None:
    engine = Engine(
        EngineOptions(
            model=str(tiny_model("llama", num_hidden_layers=1)), kv_cache_dtype="fp8",
            kv_cache_memory="1MiB", max_num_seqs=1024, max_num_batched_tokens=4096,
        )
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompts = [[4 + number % 256] for number in range(10_000)]
    prompts[::10] = [[4 + number % 256, 4 + number // 256, 7] for number in range(1000)]
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    outputs = finish(engine)
    assert len(outputs) == 10_000
    assert all(len(output.outputs[0].token_ids) == 2 for output in outputs)
    engine.check_invariants()
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
    few = [17, 5000, 9999]
    assert tokens(run(engine, [prompts[n] for n in few], max_tokens=2)) == tokens(
        [outputs[n] for n in few]
    )


def test_the_effective_settings_say_what_fp8_means_here(tiny_model, caplog) -> None:
    """Pitfall 69: the effective settings name the format, granularity, origin and computation."""
    with caplog.at_level(logging.INFO, logger="kv8"):
        start_engine(tiny_model("llama"), kv_cache_dtype="fp8", kv_scales=SCALES)
    block = next(r.getMessage() for r in caplog.records if "Effective settings" in r.getMessage())
    assert "kv_cache_dtype = fp8_e4m3" in block
    assert "per tensor, static (8 from given in Python)" in block
    assert "queries = native" in block
    assert "4 layers in float8_e4m3fn" in block
