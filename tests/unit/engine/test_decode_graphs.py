"""Decode steps played back from what was recorded: the same tokens, whatever changes in between."""

from itertools import pairwise

import pytest
import torch
from tests.engines import GREEDY, finish, run, tokens
from tests.engines import start_engine as start_any_engine
from tests.recorded_steps import DeviceLengthsBackend, OperationCapture
from tests.tiny_models import prompt_ids

from kv8.engine.decode_graphs import bucket_sizes
from kv8.engine.host_reads import host_reads
from kv8.engine.recording import record_decoding
from kv8.sampling_params import SamplingParams

LENGTHS = (3, 18, 1, 33, 9)


def start_engine(folder, **options):
    """Return an engine that computes everything by torch, as one on a GPU does."""
    plain = {"max_num_seqs": 6, "max_model_len": 96, "attention_backend": "reference"}
    return start_any_engine(folder, **plain | options)


def recorded_engine(folder, **options):
    """Return an engine whose decode steps are played back."""
    engine = start_engine(folder, **options)
    engine.runner.backend = DeviceLengthsBackend()
    engine.config = record_decoding(engine.runner, engine.config, lambda _: OperationCapture())
    return engine


def prompts():
    return [prompt_ids(length, seed=length) for length in LENGTHS]


def generate(engine, **params):
    """Return the tokens of prompts that end after different numbers of steps."""
    for number, prompt in enumerate(prompts()):
        limit = {"max_tokens": 3 + 2 * number, "ignore_eos": True}
        engine.add_request(str(number), prompt, SamplingParams(**GREEDY | limit | params))
    return tokens(finish(engine))


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20))],
)
def test_bucket_sizes(most: int, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(most) == sizes


def test_many_sequences_have_few_buckets_and_little_padding() -> None:
    sizes = bucket_sizes(1024)
    assert sizes[-1] == 1024
    assert len(sizes) < 100
    assert all(after - before <= max(8, before / 8) for before, after in pairwise(sizes))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"kv_cache_dtype": "fp8", "block_size": 4}),
        ("gemma3", {"kv_cache_dtype": "fp8_e5m2", "block_size": 4}),  # two groups, a window
        ("gemma2", {"kv_cache_dtype": "auto", "block_size": 4}),  # softcap
        ("gpt_oss", {"kv_cache_dtype": "fp8", "block_size": 8}),  # sinks
    ],
)
def test_played_back_is_computed(family, options, tiny_model) -> None:
    """Pitfall 54: graph and eager agree, tokens and what was stored alike."""
    plain = start_engine(tiny_model(family), **options)
    recorded = recorded_engine(tiny_model(family), **options)
    assert generate(recorded) == generate(plain)
    assert recorded.runner.counters.read() == plain.runner.counters.read()
    assert recorded.runner.graphs.sizes == (1, 2, 4, 6)


def test_draws_are_the_same_played_back(tiny_model) -> None:
    options = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 3}
    plain = start_engine(tiny_model("llama"))
    recorded = recorded_engine(tiny_model("llama"))
    assert generate(recorded, **options) == generate(plain, **options)


def test_only_decode_steps_are_played_back(tiny_model) -> None:
    engine = recorded_engine(tiny_model("llama"))
    played = []
    graphs = engine.runner.graphs
    original = graphs.run
    graphs.run = lambda step: played.append((step.decodes, original(step))) or played[-1][1]
    run(engine, [prompt_ids(5), prompt_ids(30)], max_tokens=6, ignore_eos=True)
    assert [logits is not None for _, logits in played] == [decodes for decodes, _ in played]
    assert [decodes for decodes, _ in played] == [False] + [True] * 5


def test_addresses_never_change(tiny_model) -> None:
    engine = recorded_engine(tiny_model("llama"))
    backend = engine.runner.backend
    addresses, steps = set(backend.addresses), backend.recorded_steps
    generate(engine)
    assert backend.addresses == addresses
    assert backend.recorded_steps == steps, "a step was computed anew instead of played back"


def test_padding_is_stored_nowhere(tiny_model) -> None:
    """Three sequences in a step of four: of the cache, three slots a layer change."""
    engine = recorded_engine(tiny_model("llama"), enable_prefix_caching=False)
    for number in range(3):
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        engine.add_request(str(number), prompt_ids(4 + number), params)
    engine.step()
    codes = [side.clone() for side in engine.runner.pool.codes(0)]
    counts = engine.runner.counters.read()
    engine.step()
    for before, after in zip(codes, engine.runner.pool.codes(0), strict=True):
        changed = (before != after).any(dim=3).any(dim=1)  # [N, B]
        assert int(changed.sum()) == 3
    assert engine.runner.counters.read() == counts  # a float32 cache counts nothing


def test_changed_scales_take_effect(tiny_model) -> None:
    """Pitfall 54: scales are values on the device, read with every step."""
    scales = {layer: {"k": 0.3, "v": 0.02} for layer in range(4)}
    folder, options = tiny_model("llama"), {"kv_cache_dtype": "fp8"}
    engine = recorded_engine(folder, **options)
    before = generate(engine)
    engine.set_scales(scales)
    after = generate(engine)
    assert after == generate(start_engine(folder, kv_scales=scales, **options))
    assert after != before


def test_changed_weights_take_effect(tiny_model) -> None:
    engine = recorded_engine(tiny_model("llama"))
    before = generate(engine)
    name = "model.layers.1.mlp.down_proj.weight"
    weight = engine.runner.model.module.state_dict()[name]
    engine.update_weights({name: weight * -3})
    after = generate(engine)
    other = start_engine(tiny_model("llama"))
    other.update_weights({name: weight})
    assert after == generate(other)
    assert after != before


def test_two_engines_share_nothing(tiny_model) -> None:
    first = recorded_engine(tiny_model("llama"), kv_cache_dtype="fp8")
    second = recorded_engine(tiny_model("llama", seed=5), kv_cache_dtype="fp8")
    alone = [generate(engine) for engine in (first, second)]
    assert alone[0] != alone[1]
    for engine in (first, second):
        for number, prompt in enumerate(prompts()):
            limit = {"max_tokens": 3 + 2 * number, "ignore_eos": True}
            engine.add_request(str(number), prompt, SamplingParams(**GREEDY | limit))
    finished = [{}, {}]
    while first.has_unfinished or second.has_unfinished:
        for engine, outputs in zip((first, second), finished, strict=True):
            outputs |= {o.request_id: o for o in engine.step() if o.finished}
    together = [tokens([o[n] for n in sorted(o, key=int)]) for o in finished]
    assert together == alone


def test_the_host_waits_for_no_part_of_a_step(tiny_model, monkeypatch) -> None:
    """From the schedule's arrays to the token numbers, which alone are waited for."""
    engine = recorded_engine(tiny_model("gemma3"), kv_cache_dtype="fp8")
    for number, prompt in enumerate(prompts()[:3]):
        params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.5 * number)
        engine.add_request(str(number), prompt, params)
    engine.step()
    waits = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: waits.append(1) or original(self))
    for name in ("item", "cpu", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host waited"))
    assert host_reads(engine.step) == []
    assert len(waits) == 1


def decision(engine) -> str:
    return next(str(d) for d in engine.config.decisions if d.name == "cuda_graphs")


def test_the_settings_say_whether_steps_are_recorded(tiny_model) -> None:
    assert "4 batch sizes" in decision(recorded_engine(tiny_model("llama")))
    engine = recorded_engine(tiny_model("llama"), enforce_eager=True)
    assert decision(engine) == "cuda_graphs = off (as asked with enforce_eager)"
    assert engine.runner.graphs is None
    engine = start_engine(tiny_model("llama"))
    config = record_decoding(engine.runner, engine.config, lambda _: OperationCapture())
    assert "backend looks at lengths" in str(config.decisions[-1])


def test_a_step_that_waits_for_the_device_is_not_recorded(tiny_model, monkeypatch) -> None:
    """A model whose code reads a number out of a tensor is served, eagerly, and says why."""
    attend = DeviceLengthsBackend.attend

    def curious(self, layer, query, batch, call):
        assert query.abs().max().item() >= 0 or bool(query.isnan().any())
        return attend(self, layer, query, batch, call)

    monkeypatch.setattr(DeviceLengthsBackend, "attend", curious)
    engine = recorded_engine(tiny_model("llama"))
    assert engine.runner.graphs is None
    assert "wait for the GPU (_local_scalar_dense)" in decision(engine)
    assert len(generate(engine)) == len(LENGTHS)
