"""What is printed, what is allocated, what is suggested and what fits are one and the same."""

import re

import pytest
import torch
from tests.engines import finish, run, start_engine
from tests.tiny_models import prompt_ids

from kv8.cache.capacity import decode_blocks
from kv8.engine.resolve import resolve_options
from kv8.errors import CapacityError, RequestError
from kv8.options import EngineOptions
from kv8.sampling_params import SamplingParams

FORMATS = ("auto", "fp8_e4m3", "fp8_e5m2")


def options_for(folder, **options):
    return EngineOptions(model=str(folder), **{"kv_cache_memory": "2MiB", **options})


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "gemma3n", "gemma4"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_suggested_length_starts_and_one_block_more_does_not(
    kv_cache_dtype, family, tiny_model
) -> None:
    """Pitfall 62: force the refusal, start with what it suggests, then with one block more."""
    memory = 40_000 if kv_cache_dtype == "auto" else 12_000
    ask = {"kv_cache_dtype": kv_cache_dtype, "kv_cache_memory": memory, "block_size": 4}
    ask["max_num_batched_tokens"] = 16
    with pytest.raises(CapacityError) as refusal:
        resolve_options(options_for(tiny_model(family), max_model_len=512, **ask))
    length = int(re.search(r"max_model_len=(\d+) or less", str(refusal.value)).group(1))
    engine = start_engine(tiny_model(family), max_model_len=length, **ask)
    prompt = prompt_ids(length - 1)
    assert len(run(engine, [prompt], max_tokens=5)[0].outputs[0].token_ids) == 1
    with pytest.raises(CapacityError) as again:
        resolve_options(options_for(tiny_model(family), max_model_len=length + 4, **ask))
    assert f"max_model_len={length} or less" in str(again.value)
    # Left to itself, the engine takes that length.
    assert resolve_options(options_for(tiny_model(family), **ask)).max_model_len == length
    # And the memory it names is enough for the length that was asked.
    needed = int(re.search(r"at least [^(]+\((\d+) bytes\)", str(refusal.value)).group(1))
    enough = options_for(
        tiny_model(family), max_model_len=512, **{**ask, "kv_cache_memory": needed}
    )
    assert resolve_options(enough).max_model_len == 512


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_filled_to_the_printed_number_without_preemption(kv_cache_dtype, tiny_model) -> None:
    ask = {"kv_cache_memory": 96 * 1024, "kv_cache_dtype": kv_cache_dtype}
    ask |= {"max_model_len": 48, "enable_prefix_caching": False}
    folder = tiny_model("llama")
    capacity = resolve_options(options_for(folder, **ask)).capacity
    num_full = int(capacity.max_concurrency)
    assert capacity.tokens == capacity.num_blocks * 16
    assert num_full == capacity.max_concurrency == capacity.tokens / 48
    for num_requests in (num_full, num_full + 1):
        engine = start_engine(folder, **ask)
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        for number in range(num_requests):
            engine.add_request(str(number), prompt_ids(32, seed=number), params)
        lowest = engine.cache.num_blocks
        while engine.has_unfinished:
            engine.step()
            lowest = min(lowest, engine.cache.num_free_blocks)
        assert lowest == 0
        assert (engine.num_preemptions > 0) == (num_requests > num_full)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_an_fp8_cache_really_takes_half(kv_cache_dtype, tiny_model) -> None:
    """Pitfall 63: bytes and dtypes of the allocated tensors, not of what was asked."""
    folder = tiny_model("llama", dtype=torch.bfloat16)
    wide = start_engine(folder, max_model_len=512, kv_cache_memory=2**20)
    tokens = wide.config.capacity.tokens
    slim = start_engine(
        folder, kv_cache_dtype=kv_cache_dtype, max_model_len=512, kv_cache_memory=2**19
    )
    assert slim.config.capacity.tokens == tokens
    scale_bytes = sum(
        tensor.nbytes
        for layer in slim.runner.layers.values()
        for tensor in (layer.k_scale, layer.v_scale, layer.counters.k, layer.counters.v)
    )
    assert slim.config.capacity.scale_bytes == scale_bytes
    assert slim.runner.pool.storage_bytes + scale_bytes <= 0.52 * wide.runner.pool.storage_bytes
    for layer in slim.runner.layers.values():
        assert (
            layer.k_codes.dtype is layer.v_codes.dtype is getattr(torch, layer.format.torch_dtype)
        )
        assert layer.k_codes.element_size() == 1


@pytest.mark.parametrize("options", [
    {"kv_cache_dtype": "auto"},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": "sliding_window"},
    {"kv_cache_dtype": "fp8", "kv_scales": {
        0: {"k": [0.1, 0.2], "v": [0.1, 0.2]}, 1: {"k": 0.1, "v": 0.1}}},
])  # fmt: skip
def test_two_head_sizes_in_one_model(options, tiny_model) -> None:
    """Pitfall 59: head sizes 16 and 32 with every kind of format start, and the bytes add up."""
    engine = start_engine(tiny_model("gemma4"), **options)
    layout, pool = engine.config.layout, engine.runner.pool
    assert {layer.head_dim for layer in engine.config.geometry.kv_layers} == {16, 32}
    assert pool.storage_bytes == engine.cache.num_blocks * layout.block_bytes
    formula = sum(
        layer.values_per_token * engine.config.plan.format(layer.layer).bytes_per_value
        for layer in engine.config.geometry.kv_layers
    )
    assert sum(map(pool.bytes_per_token, (0, 1))) == formula == layout.bytes_per_token
    assert (
        len(run(engine, [prompt_ids(60)], max_tokens=8, ignore_eos=True)[0].outputs[0].token_ids)
        == 8
    )


def test_window_layers_left_in_the_models_dtype(tiny_model) -> None:
    """Pitfall 58: a layer type in the skip list; the map, the tensors, and a typo's suggestion."""
    folder = tiny_model("gemma3")
    engine = start_engine(folder, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers="sliding_window")
    assert [str(layer.k_codes.dtype) for layer in engine.runner.layers.values()] == [
        "torch.float32", "torch.float32", "torch.float32", "torch.float8_e4m3fn",
    ]  # fmt: skip
    assert set(engine.runner.counters.read()) == {3}
    run(engine, [prompt_ids(40)])
    with pytest.raises(RequestError, match="sliding_window"):
        resolve_options(
            options_for(folder, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers="sliding_windows")
        )


def test_windows_let_go_of_what_they_passed(tiny_model) -> None:
    engine = start_engine(tiny_model("gemma3"), block_size=4, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    engine.add_request("0", prompt_ids(100), params)
    while engine.has_unfinished:
        engine.step()
        if not engine.has_unfinished:
            break
        held = engine.cache.num_blocks - engine.cache.num_free_blocks
        request = engine.scheduler.running[0]
        if request.num_output_tokens > 1:
            assert held <= decode_blocks(engine.config.layout, request.num_tokens)
    whole = sum(-(-299 // group.block_tokens) for group in engine.config.layout.groups)
    assert decode_blocks(engine.config.layout, 299) < whole / 2


@pytest.mark.parametrize("kv_cache_dtype", [
    "auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "float32"])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_offered_choice_serves(dtype, kv_cache_dtype, tiny_model) -> None:
    """Pitfall 67: each value the options offer serves a token on this machine."""
    engine = start_engine(tiny_model("llama"), dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    output = run(engine, [prompt_ids(20)], max_tokens=2, ignore_eos=True)[0].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 2)


def test_what_cannot_run_is_refused_before_weights_are_read(tiny_model, monkeypatch) -> None:
    """Pitfalls 56, 67: reason and alternatives in a second, not a trace after a long start."""
    import kv8.engine.engine as module

    monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    folder = tiny_model("gpt_oss")
    for options, message in (
        ({"attention_backend": "warp"}, "Allowed: auto, measured, triton, cpu, flash3, reference"),
        ({"query_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        ({"kv_scales": {0: {"k": 1.0, "v": 1.0}}}, "kv_cache_dtype=fp8"),
        ({"kv_cache_dtype": "fp8", "kv_scales": {0: {"k": float("nan")}}}, "kv_scales"),
        ({"max_model_len": 10_000}, "at most 512"),
        ({"kv_cache_memory": 100}, "too few to serve anything"),
        ({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": "9"}, "9"),
        ({"max_model_len": 1}, "at least 2"),
    ):
        with pytest.raises(RequestError, match=re.escape(message)):
            start_engine(folder, **options)


def test_a_failing_layer_stops_the_start(tiny_model, monkeypatch) -> None:
    """Pitfall 56: the start-up probe takes every path, so what fails there never gets a user."""
    from kv8.attention.reference import ReferenceBackend

    real = ReferenceBackend.attend

    def no_sinks_in_fp8(self, layer, query, batch, call):
        if call.sinks is not None and layer.format.quantized and max(batch.query_lens_host) == 1:
            raise RuntimeError("no decode kernel for sinks over fp8")
        return real(self, layer, query, batch, call)

    monkeypatch.setattr(ReferenceBackend, "attend", no_sinks_in_fp8)
    options = {"attention_backend": "reference"}
    start_engine(tiny_model("gpt_oss"), **options)
    with pytest.raises(RuntimeError, match="no decode kernel"):
        start_engine(tiny_model("gpt_oss"), kv_cache_dtype="fp8", **options)


def test_prompts_that_outgrow_the_cache_together_still_finish(tiny_model) -> None:
    engine = start_engine(
        tiny_model("llama"), kv_cache_memory=64 * 1024, max_model_len=64, kv_cache_dtype="fp8"
    )
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for number in range(40):
        engine.add_request(str(number), prompt_ids(1 + number % 34, seed=number), params)
    outputs = finish(engine)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30] * 40
    assert engine.num_preemptions > 0
