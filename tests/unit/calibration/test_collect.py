"""Collecting: complete, free of side effects, and independent of order, batches and threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.engines import run, start_engine, tokens
from tests.observing import LENGTHS, numbers, observe, same, scales_of, texts
from tests.tiny_models import FAMILIES, PAD, TinyModel, prompt_ids

from kv8.calibration.collect import collect, sample_batches
from kv8.calibration.observations import Observations
from kv8.calibration.observer import ObservingBackend
from kv8.calibration.parts import split_samples
from kv8.engine.engine import Engine
from kv8.engine.runner import Runner
from kv8.engine.scoring import prompt_logits
from kv8.errors import RequestError, ScaleError, UnsupportedModelError
from kv8.kernels.cpu import load_kernels
from kv8.kernels.step import MOST_ROWS, UNLIMITED

DTYPES = (torch.float32, torch.bfloat16)


def engine_of(tiny_model: TinyModel, family: str = "llama", **options: object) -> Engine:
    dtype = options.pop("dtype", torch.float32)
    return start_engine(tiny_model(family, dtype=dtype), **options)


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_gives_every_cache_and_every_query_a_scale(
    tiny_model: TinyModel, family: str
) -> None:
    """Pitfall 19: windows, shared KV, sinks, experts: calibration reaches every layer."""
    engine = engine_of(tiny_model, family)
    observations = observe(engine, texts())
    geometry = engine.config.geometry
    scales = scales_of(engine, observations, strategy="attn_head")
    for layer in geometry.layers:
        found = scales.layer(layer.layer)
        assert len(found.q.values) == layer.num_heads
        for scale in (found.k, found.v):
            assert (scale is not None) is layer.owns_kv
            if scale is not None:
                assert len(scale.values) == layer.num_kv_heads
                assert all(value != 1.0 and value > 0 for value in scale.values)
    assert sum(observations.num_tokens.values()) == sum(LENGTHS)


def test_what_is_observed_is_what_is_stored(tiny_model: TinyModel) -> None:
    """The extremes are those of the keys and values that an unquantized cache holds."""
    engine = engine_of(tiny_model, kv_cache_dtype="float32")
    prompt = prompt_ids(40)
    for number in range(4):  # the start-up probe was stored there
        for codes in engine.runner.pool.codes(number):
            codes.zero_()
    list(prompt_logits(engine, prompt))
    observations = observe(engine, [prompt])
    for number in range(4):
        k_codes, v_codes = engine.runner.pool.codes(number)
        for side, codes in (("k", k_codes), ("v", v_codes)):
            histogram = observations.histogram(number, side)  # type: ignore[arg-type]
            assert histogram is not None
            assert torch.equal(histogram.absmax, codes.abs().amax(dim=(0, 2, 3)))
            assert int(histogram.counts[:, 1:].sum()) == int(codes.count_nonzero())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma3n", "gpt_oss"])
def test_logits_are_those_of_ordinary_inference(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype
) -> None:
    """Pitfall 17: observing changes nothing; logits are equal bit for bit."""
    name = str(dtype).removeprefix("torch.")
    engine = engine_of(
        tiny_model, family, dtype=dtype, kv_cache_dtype=name, max_num_batched_tokens=32
    )
    prompt = prompt_ids(75)
    ordinary = torch.cat(list(prompt_logits(engine, prompt)))
    ends = [step[-1] for step in ordinary.split(32)]

    computed: list[torch.Tensor] = []
    run_step = Runner.run

    def noting(self, step):
        step = step.with_rows([len(step.arrays.input_ids) - 1])
        computed.append(run_step(self, step)[0])
        return computed[-1].unsqueeze(0)

    monkeypatch.setattr(Runner, "run", noting)
    observe(engine, [prompt])
    assert len(computed) == len(ends) == 3
    assert all(torch.equal(a, b) for a, b in zip(computed, ends, strict=True))


def test_the_engine_is_left_as_it_was(tiny_model: TinyModel) -> None:
    """Pitfall 17: no stored block, count, prefix or scale of the engine changes."""
    engine = engine_of(
        tiny_model, kv_cache_dtype="fp8", kv_scales={n: {"k": 0.02, "v": 0.02} for n in range(4)}
    )
    before = tokens(run(engine, [prompt_ids(40)], max_tokens=8))
    counts, key = engine.runner.counters.read(), engine.runner.cache_key()
    free, stats = engine.cache.num_free_blocks, engine.cache.stats
    observe(engine, texts())
    assert engine.runner.counters.read() == counts
    assert (engine.runner.cache_key(), engine.cache.num_free_blocks) == (key, free)
    assert engine.cache.stats == stats
    assert tokens(run(engine, [prompt_ids(40)], max_tokens=8)) == before


def test_observed_values_do_not_depend_on_the_scales_in_use(tiny_model: TinyModel) -> None:
    """Pitfall 17: values come from the unquantized model, whatever the engine serves with."""
    folder = tiny_model("llama", dtype=torch.bfloat16)
    plain = observe(start_engine(folder), texts())
    tight = {n: {"k": 1e-4, "v": 1e-4} for n in range(4)}
    assert same(
        observe(start_engine(folder, kv_cache_dtype="fp8", kv_scales=tight), texts()), plain
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_neither_order_nor_batches_change_a_bit(tiny_model: TinyModel, family: str) -> None:
    """Pitfall 17: twice, shuffled, one by one or together: one result, to the last bit.

    Kv8's own kernels compute the products here; a token's do not depend on the tokens beside it.
    """
    engine = engine_of(tiny_model, family, dtype=torch.bfloat16)
    assert engine.runner.model.fusion is not None
    samples = texts()
    expected = numbers(scales_of(engine, observe(engine, samples)))
    assert numbers(scales_of(engine, observe(engine, samples))) == expected
    assert numbers(scales_of(engine, observe(engine, samples[::-1]))) == expected
    assert numbers(scales_of(engine, observe(engine, samples, batch_size=1))) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_steps_are_as_large_as_not_a_bit_depends_on_it(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, family: str, dtype: torch.dtype
) -> None:
    """On a matrix unit that is any number of rows of a bfloat16 model, else 64; see `most_rows`."""
    engine = engine_of(tiny_model, family, dtype=dtype)
    fusion = engine.runner.model.fusion
    assert fusion is not None
    on_unit = load_kernels(announce=False).has_matrix_unit and dtype is torch.bfloat16
    assert fusion.most_native == (UNLIMITED if on_unit else MOST_ROWS)

    sizes: list[int] = []
    run_step = Runner.run

    def noting(self, step):
        sizes.append(step.input_ids.numel())
        return run_step(self, step)

    monkeypatch.setattr(Runner, "run", noting)
    samples = texts([360] * 6)
    expected = observe(engine, samples)
    assert max(sizes) == min(fusion.most_native, 3 * 360)  # so many samples are packed together
    for most in (64, 17):
        sizes.clear()
        fusion.most_native = most
        assert same(observe(engine, samples), expected)
        assert max(sizes) == most


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma3n"])
def test_threads_change_no_count(tiny_model: TinyModel, family: str, dtype: torch.dtype) -> None:
    engine = engine_of(tiny_model, family, dtype=dtype)
    samples = texts([60, 64, 50, 3])
    with threads(1):
        alone = observe(engine, samples)
    with threads(2):
        assert same(observe(engine, samples), alone)


@pytest.mark.parametrize("family", ["llama_mqa", "gemma2", "gemma3n", "gpt_oss"])
def test_where_torch_multiplies_its_rounding_is_left(tiny_model: TinyModel, family: str) -> None:
    """Torch sums a product in an order that depends on its shape. A float32 sum of n products is
    off by n * 2**-24 of their magnitudes; over 4 layers of up to 96 inputs, with values that cancel
    to a tenth of that: 4 * 96 * 2**-24 * 10 = 2.3e-4. Measured: 3e-7 at most.
    """
    engine = engine_of(tiny_model, family, attention_backend="reference")
    assert engine.runner.model.fusion is None
    samples = texts()
    expected = numbers(scales_of(engine, observe(engine, samples)))
    for other, batch_size in ((samples[::-1], 8), (samples, 1)):
        found = numbers(scales_of(engine, observe(engine, other, batch_size=batch_size)))
        assert found.keys() == expected.keys()
        for key, values in found.items():
            assert values == pytest.approx(expected[key], rel=2.3e-4)


def test_a_layer_that_bypasses_the_observer_is_named(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pitfall 16: a layer whose keys calibration does not get to see is an error naming it."""
    note = ObservingBackend._note

    def note_all_but_layer_2(self, layer, side, values, batch):
        if layer.geometry.layer != 2 or side == "q":
            note(self, layer, side, values, batch)

    monkeypatch.setattr(ObservingBackend, "_note", note_all_but_layer_2)
    engine = engine_of(tiny_model)
    observations = observe(engine, texts())
    with pytest.raises(ScaleError, match=r"keys of layer 2 \(0\), values of layer 2 \(0\)"):
        scales_of(engine, observations)


def test_a_layer_that_never_attends_is_named(tiny_model: TinyModel) -> None:
    """Pitfall 16: so is a layer that reads its cache another way than through attention."""
    engine = engine_of(tiny_model, attention_backend="reference")
    attention = engine.runner.model.attention_modules[2]
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UnsupportedModelError, match=r"layers \[2\] never called"):
        observe(engine, texts())


def test_values_that_are_not_finite_stop_it_naming_the_layer(tmp_path: Path) -> None:
    from tests.tiny_models import save_model

    def spoil(model) -> None:
        model.model.layers[1].self_attn.v_proj.weight[0] = torch.nan

    folder = save_model(tmp_path / "model", edit=spoil)
    with pytest.raises(ScaleError, match=r"values of layers? 1"):
        observe(start_engine(folder), texts())


def test_it_goes_on_after_the_samples_done_before(tiny_model: TinyModel) -> None:
    engine, samples = engine_of(tiny_model), texts()
    whole, steps = observe(engine, samples, batch_size=2), []
    half = Observations("float32")

    class StopError(Exception):
        pass

    def stop_in_the_middle(done: int) -> None:
        steps.append(done)
        if done >= 4:
            raise StopError

    with pytest.raises(StopError):
        collect(
            engine.runner.model,
            engine.config,
            samples,
            half,
            batch_size=2,
            on_batch=stop_in_the_middle,
        )
    assert steps == [2, 4]
    collect(engine.runner.model, engine.config, samples, half, batch_size=2, start=4)
    assert same(half, whole)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ([], "Sample 1 .* has 0 tokens"),
        (prompt_ids(513), "Sample 1 .* has 513 tokens; between 1 and 512"),
        ([PAD, 10_000], "Sample 1 .* none of the model's, 0 to 259"),
        ([-1], "Sample 1 .* none of the model's"),
    ],
)
def test_a_sample_that_cannot_be_computed_is_refused(
    tiny_model: TinyModel, sample: list[int], message: str
) -> None:
    observations, engine = Observations("float32"), engine_of(tiny_model)
    with pytest.raises(RequestError, match=message):
        collect(engine.runner.model, engine.config, [prompt_ids(3), sample], observations)
    assert observations.tensors() == {}


def test_batches_hold_samples_of_one_part() -> None:
    parts = split_samples(texts([3] * 21), held_out=0.2)
    assert [parts.count(part) for part in ("first", "second", "held_out")] == [9, 8, 4]
    batches = list(sample_batches(parts, 4))
    assert [sample for batch in batches for sample in batch.samples] == [
        sample
        for part in ("first", "second", "held_out")
        for sample in range(21)
        if parts[sample] == part
    ]
    assert all(len(batch.samples) <= 4 for batch in batches)
    assert batches[-1].num_done == 21


def test_parts_follow_the_samples_when_they_are_shuffled() -> None:
    samples = texts([3] * 12)
    parts = dict(zip(map(tuple, samples), split_samples(samples, 0.25), strict=True))
    turned = samples[5:] + samples[:5]
    assert split_samples(turned, 0.25) == [parts[tuple(sample)] for sample in turned]


@pytest.mark.parametrize(
    ("number", "share", "held_out"),
    [(3, 0.1, 0), (4, 0.1, 1), (40, 0.1, 4), (40, 0.0, 0), (1, 0.9, 0)],
)
def test_how_many_are_held_out(number: int, share: float, held_out: int) -> None:
    assert split_samples(texts([2] * number), share).count("held_out") == held_out
