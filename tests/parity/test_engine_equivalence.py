"""However the work is cut up, the answer is the same: chunks, batches, prefixes, preemption.

Two bounds are used throughout.

`FLOAT_ROUNDING` is for caches that store what they are given. Other batch shapes make the matrix
products of the model add up in another order. A logit is a sum of some 64 products, behind 4 layers
that are such sums, and at most about 20; a log probability is the difference of two such numbers:
64 * 4 * 2**-24 * 20 * 2 = 6e-4 at worst, and rounding errors do not all point one way, so 1e-4.

`flip_bound` is for quantized caches. There the same tiny difference can carry a value across a
rounding boundary of the format, and its code moves by one step. Quantization itself moved each of
the N stored values a query sees by an error spread evenly over a step, 1 / sqrt(12) of it in the
mean: together sqrt(N / 12) steps, which shows as the gap between quantized and unquantized model.
One moved code is one step and shows as sqrt(12 / N) of that gap. With N of at least
4 layers * 2 sides * 2 heads * 16 values * 8 tokens = 2048, ten moved codes are less than a quarter
of the gap; without any the difference is `FLOAT_ROUNDING` again.
"""

import pytest
import torch
from tests.attention_backends import kernels_or_skip
from tests.engines import (
    first_logprobs,
    run,
    start_engine,
    teacher_forced,
    tokens,
    widest_gap,
)
from tests.tiny_models import prompt_ids

from kv8.cache.capacity import decode_blocks, peak_blocks

FLOAT_ROUNDING = 1e-4
MIXED = ("llama", "gemma3", "gpt_oss", "gemma4")  # plain, windows, sinks, shared KV
QUANTIZED = ("fp8_e4m3", "fp8_e5m2")


def flip_bound(quantized, exact) -> float:
    return max(FLOAT_ROUNDING, float((quantized - exact).abs().max()) / 4)


def start_tight_engine(folder, **options):
    """Return an engine with room for two prompts of 24 tokens, but not for their outputs too."""
    options = {"block_size": 4, "max_model_len": 56, "max_num_batched_tokens": 4, **options}
    layout = start_engine(folder, **options).config.layout
    num_blocks = max(decode_blocks(layout, 24) + peak_blocks(layout, 24), peak_blocks(layout, 56))
    return start_engine(folder, **options, kv_cache_memory=num_blocks * layout.block_bytes)


def no_trend(gaps, bound) -> bool:
    """Whether late positions are no worse than early ones, a code moved half-way apart.

    A scale forgotten on the decode path would make the error grow with every stored token.
    """
    half = len(gaps) // 2
    return bool(gaps[half:].mean() < max(2 * gaps[:half].mean(), bound / 4))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
@pytest.mark.parametrize("stored_as", ["auto", "fp8_e4m3"])
def test_on_a_matrix_unit_not_a_bit_depends_on_how_the_work_is_cut(
    family, stored_as, tiny_model
) -> None:
    if not kernels_or_skip().has_matrix_unit:
        pytest.skip("this CPU has no matrix unit that the kernels know")
    folder = tiny_model(family, dtype=torch.bfloat16, vocab_size=272)
    ids = prompt_ids(300, seed=3)
    options = {"kv_cache_dtype": stored_as, "max_num_batched_tokens": 512}
    options |= {"max_model_len": 400, "dtype": "bfloat16", "attention_backend": "cpu"}
    whole, *others = (
        teacher_forced(start_engine(folder, **options), ids, chunks=chunks)
        for chunks in ([300], [1], [7], [64], [65, 3, 200, 1])
    )
    assert all(torch.equal(whole, other) for other in others)


@pytest.mark.parametrize("family", MIXED)
def test_chunks_batches_prefixes_and_preemption_do_not_change_the_tokens(
    family, tiny_model
) -> None:
    folder = tiny_model(family)
    prompts = [prompt_ids(length, seed=length) for length in (40, 17, 33, 1)]
    ask = {"max_tokens": 12, "ignore_eos": True}
    plain = start_engine(folder, enable_prefix_caching=False)
    expected = [tokens(run(plain, [prompt], **ask))[0] for prompt in prompts]

    for options in (
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 64, "max_num_seqs": 2},
        {"block_size": 1},
        {"block_size": 64},
        {"enable_prefix_caching": False, "max_num_seqs": 1},
    ):
        engine = start_engine(folder, **options)
        for _ in range(2):  # the second time with whatever the prefix cache has
            assert tokens(run(engine, prompts, **ask)) == expected, options


@pytest.mark.parametrize("family", MIXED)
def test_preemption_does_not_change_the_tokens(family, tiny_model) -> None:
    folder = tiny_model(family)
    prompts = [prompt_ids(24, seed=seed) for seed in range(5)]
    ask = {"max_tokens": 30, "ignore_eos": True}
    roomy, tight = start_engine(folder, block_size=4), start_tight_engine(folder)
    expected = tokens(run(roomy, prompts, **ask))
    assert tokens(run(tight, prompts, **ask)) == expected
    assert roomy.num_preemptions == 0
    assert tight.num_preemptions > 0


@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *QUANTIZED])
def test_log_probabilities_do_not_depend_on_chunks_or_block_size(
    kv_cache_dtype, family, tiny_model
) -> None:
    """Pitfalls 28, 30, 45: decode, chunked and whole prefill read the same stored codes."""
    folder = tiny_model(family)
    ids = prompt_ids(200, seed=3)
    exact = teacher_forced(start_engine(folder), ids, chunks=[200])
    engine = start_engine(folder, kv_cache_dtype=kv_cache_dtype)
    whole = teacher_forced(engine, ids, chunks=[200])
    bound = FLOAT_ROUNDING if kv_cache_dtype == "auto" else flip_bound(whole, exact)
    for chunks in ([7], [64], [3, 1]):
        cut = teacher_forced(engine, ids, chunks=chunks)
        gap = (cut - whole).abs()
        assert gap.max() < bound, chunks
        assert no_trend(gap.mean(dim=1), bound), chunks
    for block_size in (1, 64):
        other = start_engine(folder, kv_cache_dtype=kv_cache_dtype, block_size=block_size)
        assert (teacher_forced(other, ids, chunks=[64]) - whole).abs().max() < bound


@pytest.mark.parametrize("kv_cache_dtype", QUANTIZED)
@pytest.mark.parametrize("rope_factor", [1.0, 4.0])
def test_long_decode_has_no_error_trend_under_scaled_rope(
    rope_factor, kv_cache_dtype, tiny_model
) -> None:
    """Pitfall 28: 200 teacher-forced decode steps against one-shot prefill, rotary scaling too."""
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": rope_factor}
    folder = tiny_model("llama", rope_parameters=rope)
    scales = {layer: {"k": 0.02, "v": [0.01, 0.03]} for layer in range(4)}
    ids = prompt_ids(208, seed=5)
    exact = teacher_forced(start_engine(folder), ids, chunks=[208])
    engine = start_engine(folder, kv_cache_dtype=kv_cache_dtype, kv_scales=scales)
    whole = teacher_forced(engine, ids, chunks=[208])
    decoded = teacher_forced(engine, ids, chunks=[8, 1])
    gap = (decoded - whole).abs().amax(dim=1)[8:]
    assert gap.max() < flip_bound(whole, exact)
    assert no_trend(gap, flip_bound(whole, exact))


@pytest.mark.parametrize("kv_cache_dtype", QUANTIZED)
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("chunk", [7, 64, 2048])
@pytest.mark.parametrize("batch", [1, 3])
def test_feature_matrix(
    batch, chunk, prefix_caching, kv_cache_dtype, tiny_model, reference
) -> None:
    """Pitfalls 45, 49: every cell gives the answer of a cold, whole, lone request."""
    engine = start_engine(
        tiny_model("llama"),
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=prefix_caching,
        max_num_batched_tokens=chunk,
    )
    prompts, expected, bound = reference(kv_cache_dtype)
    ask = {"max_tokens": 4, "logprobs": 20, "ignore_eos": True}
    for repeat in range(3):
        outputs = []
        for start in range(0, len(prompts), batch):
            outputs += run(engine, prompts[start : start + batch], **ask)
        assert widest_gap(first_logprobs(outputs), expected) < bound
        cached = [output.num_cached_tokens for output in outputs]
        assert all(cached) if repeat and prefix_caching else prefix_caching or not any(cached)


@pytest.fixture(scope="module")
def reference(tiny_model):
    """Return, for a format, prompts with a common beginning, their answers, and the bound."""
    known = {}
    common = prompt_ids(48, seed=9)
    prompts = [common + prompt_ids(length, seed=length) for length in (3, 20, 37)]
    ask = {"max_tokens": 1, "logprobs": 20, "ignore_eos": True}

    def of(kv_cache_dtype):
        if kv_cache_dtype not in known:
            options = {"enable_prefix_caching": False}
            exact = start_engine(tiny_model("llama"), **options)
            cold = start_engine(tiny_model("llama"), kv_cache_dtype=kv_cache_dtype, **options)
            right = [first_logprobs(run(exact, [prompt], **ask))[0] for prompt in prompts]
            answers = [first_logprobs(run(cold, [prompt], **ask))[0] for prompt in prompts]
            noise = widest_gap(answers, right)
            known[kv_cache_dtype] = answers, max(FLOAT_ROUNDING, noise / 4)
        return prompts, *known[kv_cache_dtype]

    return of


@pytest.mark.parametrize("kv_cache_dtype", QUANTIZED)
def test_preempted_requests_continue_as_if_nothing_had_happened(kv_cache_dtype, tiny_model) -> None:
    """A recomputed sequence stores the codes it had: its later log probabilities are the same."""
    folder = tiny_model("llama")
    prompts = [prompt_ids(24, seed=seed) for seed in range(5)]
    ask = {"max_tokens": 20, "logprobs": 20, "ignore_eos": True}
    roomy = start_engine(folder, kv_cache_dtype=kv_cache_dtype)
    tight = start_tight_engine(folder, kv_cache_dtype=kv_cache_dtype)
    expected, outputs = run(roomy, prompts, **ask), run(tight, prompts, **ask)
    assert tight.num_preemptions > 0
    forced = teacher_forced(roomy, prompts[0], chunks=[24])
    bound = flip_bound(forced, teacher_forced(start_engine(folder), prompts[0], chunks=[24]))
    for output, right in zip(outputs, expected, strict=True):
        for ours, theirs in zip(output.outputs[0].logprobs, right.outputs[0].logprobs, strict=True):
            both = ours.keys() & theirs.keys()
            assert max(abs(ours[t].logprob - theirs[t].logprob) for t in both) < bound
            if ours.keys() != theirs.keys():  # a tie fell the other way: they part here
                break


def test_prompt_log_probabilities_are_those_of_the_whole_prompt(tiny_model) -> None:
    engine = start_engine(tiny_model("llama"), max_num_batched_tokens=7)
    ids = prompt_ids(40, seed=4)
    expected = teacher_forced(engine, ids, chunks=[40])
    run(engine, [ids])  # now the prefix cache has it, and must not be used
    output = run(engine, [ids], prompt_logprobs=3, max_tokens=1)[0]
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(ids)
    for position in range(1, len(ids)):
        report = output.prompt_logprobs[position]
        right = expected[position - 1]
        assert report[ids[position]].logprob == pytest.approx(
            float(right[ids[position]]), abs=FLOAT_ROUNDING
        )
        assert set(right.topk(3).indices.tolist()) <= report.keys()


def test_prompt_log_probabilities_survive_preemption(tiny_model) -> None:
    ids = [prompt_ids(24, seed=seed) for seed in range(5)]
    ask = {"max_tokens": 20, "ignore_eos": True, "prompt_logprobs": 1}
    roomy, tight = start_engine(tiny_model("llama")), start_tight_engine(tiny_model("llama"))
    expected, outputs = run(roomy, ids, **ask), run(tight, ids, **ask)
    assert tight.num_preemptions > 0
    for output, right in zip(outputs, expected, strict=True):
        assert len(output.prompt_logprobs) == 24
        for ours, theirs in zip(output.prompt_logprobs[1:], right.prompt_logprobs[1:], strict=True):
            assert list(ours) == list(theirs)
            for token in ours:
                assert ours[token].logprob == pytest.approx(
                    theirs[token].logprob, abs=FLOAT_ROUNDING
                )


def test_first_request_equals_the_tenth(tiny_model) -> None:
    """Pitfall 35: the start-up probe leaves nothing behind, and nothing is set up lazily."""
    for kv_cache_dtype in QUANTIZED:
        engine = start_engine(
            tiny_model("llama"), kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False
        )
        assert all(c.k.stored == c.v.stored == 0 for c in engine.runner.counters.read().values())
        assert engine.cache.num_free_blocks == engine.cache.num_blocks
        assert engine.cache.stats.queries == 0
        ids = prompt_ids(37, seed=6)
        first = teacher_forced(engine, ids, chunks=[37])
        for _ in range(8):
            run(engine, [prompt_ids(50, seed=7)])
        assert torch.equal(teacher_forced(engine, ids, chunks=[37]), first)
