"""The hook: what reaches a backend, what is refused, and that models never mix."""

from typing import Any

import pytest
import torch
from tests.packed import PassThroughBackend, make_layers, packed_logits
from tests.tiny_models import LAYERS, VOCAB, make_config, make_model, prompt_ids

from kv8.attention.backend import AttentionCall
from kv8.attention.reference import ReferenceBackend
from kv8.errors import EngineError, UnsupportedModelError
from kv8.models.geometry import read_geometry
from kv8.models.hook import HookedModel
from kv8.models.interface import BINDING, attend_through_cache
from kv8.models.probe import probe_batch


def hooked(family: str = "llama", *, seed: int = 2, **overrides: Any) -> HookedModel:
    config = make_config(family, **overrides)
    config.dtype = "float32"
    return HookedModel(make_model(config, seed=seed), read_geometry(config))


def run(model: HookedModel, ids: list[int], rows: list[int]) -> torch.Tensor:
    return model.forward(
        torch.tensor(ids), torch.arange(len(ids)), torch.tensor(rows, dtype=torch.int64)
    )


def step(model: HookedModel, length: int = 12) -> tuple[Any, ...]:
    return probe_batch([length], [length], [length], model.device), make_layers(model, length)


def test_a_forward_pass_without_a_batch_is_an_error() -> None:
    with pytest.raises(EngineError, match="outside of"):
        run(hooked(), prompt_ids(4), [0])


def test_the_module_called_directly_without_a_batch_is_an_error_too() -> None:
    with pytest.raises(EngineError, match="outside of"):
        hooked().module(torch.tensor([prompt_ids(4)]), use_cache=False)


def test_batches_do_not_nest_and_end_with_the_block() -> None:
    model = hooked()
    batch, layers = step(model)
    with model.bound(batch, layers, ReferenceBackend()):
        with (
            pytest.raises(EngineError, match="already bound"),
            model.bound(batch, layers, ReferenceBackend()),
        ):
            pass
        with pytest.raises(EngineError, match="cannot be recorded"), model.recording("eager"):
            pass
        run(model, prompt_ids(12), [11])
    with pytest.raises(EngineError, match="outside of"):
        run(model, prompt_ids(12), [11])


def test_a_batch_is_released_when_a_step_fails() -> None:
    model = hooked()
    batch, layers = step(model)
    with pytest.raises(ZeroDivisionError), model.bound(batch, layers, ReferenceBackend()):
        _ = 1 / 0
    with model.bound(batch, layers, ReferenceBackend()):
        run(model, prompt_ids(12), [11])


def test_a_batch_serves_one_forward_pass() -> None:
    model = hooked()
    batch, layers = step(model)
    with model.bound(batch, layers, ReferenceBackend()):
        run(model, prompt_ids(12), [11])
        with pytest.raises(EngineError, match="one forward pass"):
            run(model, prompt_ids(12), [11])


@pytest.mark.parametrize("rows", [[], [11], [0, 5, 11], [11, 0], list(range(12))])
def test_logits_are_those_of_the_rows_asked_for(rows: list[int]) -> None:
    model = hooked(dtype="bfloat16")
    ids = prompt_ids(12)
    everything = packed_logits(model, [ids])[0]
    batch, layers = step(model)
    with model.bound(batch, layers, ReferenceBackend()):
        logits = run(model, ids, rows)
    assert logits.shape == (len(rows), VOCAB)
    assert logits.dtype == torch.float32
    # The output layer multiplies another number of rows: float32 rounding, 64 products long.
    torch.testing.assert_close(logits, everything[rows], rtol=1e-5, atol=1e-5)


def test_two_models_in_one_process_do_not_mix() -> None:
    """Pitfall 34: each model's layers find their own batch and cache, whoever runs in between."""
    one, two = hooked(seed=1), hooked("gemma2", seed=2)
    ids = prompt_ids(12)
    expected = packed_logits(one, [ids])[0], packed_logits(two, [ids])[0]
    (batch_one, layers_one), (batch_two, layers_two) = step(one), step(two)
    rows = list(range(12))
    with (
        one.bound(batch_one, layers_one, ReferenceBackend()),
        two.bound(batch_two, layers_two, ReferenceBackend()),
    ):
        assert torch.equal(run(two, ids, rows), expected[1])
        assert torch.equal(run(one, ids, rows), expected[0])


def test_hooking_twice_is_harmless() -> None:
    first = hooked()
    ids = prompt_ids(12)
    expected = packed_logits(first, [ids])[0]
    second = HookedModel(first.module, first.geometry)
    assert torch.equal(packed_logits(second, [ids])[0], expected)
    assert torch.equal(packed_logits(first, [ids])[0], expected)
    batch, layers = step(first)
    with (
        first.bound(batch, layers, ReferenceBackend()),
        pytest.raises(EngineError, match="already bound"),
        second.bound(batch, layers, ReferenceBackend()),
    ):
        pass


def calls_of(model: HookedModel) -> tuple[PassThroughBackend, dict[int, AttentionCall]]:
    backend = PassThroughBackend(lambda geometry, query, key, value, call: torch.zeros_like(query))
    packed_logits(model, [prompt_ids(12)], backend=backend)
    return backend, backend.calls  # type: ignore[return-value]


def test_everything_a_model_asks_for_reaches_the_backend() -> None:
    """Pitfalls 26, 28: scale, cap, sinks and window are arguments that cannot be left out."""
    _, calls = calls_of(hooked("gemma2"))
    for number, call in calls.items():
        # query_pre_attn_scalar, not the head size
        assert call.softmax_scale == pytest.approx(24**-0.5)
        assert call.softcap == 5.0
        assert call.sinks is None
        assert call.window == (8 if number % 2 == 0 else None)
    model = hooked("gpt_oss")
    _, calls = calls_of(model)
    for number, call in calls.items():
        sinks = model.module.model.layers[number].self_attn.sinks
        assert call.sinks is not None
        assert torch.equal(call.sinks, sinks.detach())
        assert call.sinks.dtype == torch.float32
    _, calls = calls_of(hooked("granite"))
    assert {call.softmax_scale for call in calls.values()} == {0.2}


def test_layers_that_share_keys_and_values_store_nothing() -> None:
    backend, calls = calls_of(hooked("gemma4"))
    assert sorted(backend.keys) == [0, 1]
    assert sorted(calls) == list(range(LAYERS))


def test_tensors_reach_the_backend_as_tokens_heads_size() -> None:
    backend, _ = calls_of(hooked("llama_mqa"))
    assert {tuple(key.shape) for key in backend.keys.values()} == {(12, 1, 16)}


def test_keys_and_values_are_not_confused() -> None:
    """Pitfall 33: with V constant, attention gives that constant whatever K is."""
    model = hooked()
    with torch.no_grad():
        for module in model.attention_modules.values():
            module.v_proj = torch.nn.Linear(64, 32)
            module.v_proj.weight.zero_()
            module.v_proj.bias.fill_(3.0)
    seen = []

    class Watching(ReferenceBackend):
        def attend(self, *arguments: Any) -> torch.Tensor:
            seen.append(super().attend(*arguments))
            return seen[-1]

    packed_logits(model, [prompt_ids(20)], backend=Watching())
    assert len(seen) == LAYERS
    for output in seen:
        torch.testing.assert_close(output, torch.full_like(output, 3.0))


def call_hook(model: HookedModel, layer: int = 0, **keywords: Any) -> torch.Tensor:
    """Call the attention function as a model would, with other keywords."""
    module = model.attention_modules[layer]
    geometry = model.geometry.layer(layer)
    query = torch.randn(1, geometry.num_heads, 12, geometry.head_dim)
    key = keywords.pop("key", torch.randn(1, geometry.num_kv_heads, 12, geometry.head_dim))
    mask = keywords.pop("attention_mask", None)
    asked = {"scaling": 0.25, "dropout": 0.0, "sliding_window": geometry.window} | keywords
    batch, layers = step(model)
    with model.bound(batch, layers, ReferenceBackend()):
        return attend_through_cache(module, query, key, key.clone(), mask, **asked)[0]


def test_a_call_returns_the_shape_transformers_expects() -> None:
    assert call_hook(hooked()).shape == (1, 12, 4, 16)


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "does not know: position_bias"),
        ({"head_mask": torch.ones(4)}, "does not know: head_mask"),
        ({"indices": [1], "block_indices": [2]}, "does not know: block_indices, indices"),
        ({"output_attentions": True}, "does not know: output_attentions"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "later tokens"),
        ({"sliding_window": 4}, "window of 4 tokens, but its config says None"),
        ({"attention_mask": torch.zeros(1, 1, 12, 12)}, "mask of its own"),
        ({"key": torch.randn(1, 4, 12, 16)}, r"keys of shape \(1, 4, 12, 16\)"),
        ({"key": torch.randn(1, 2, 11, 16)}, r"keys of shape \(1, 2, 11, 16\)"),
        ({"key": torch.randn(1, 2, 12, 8)}, r"keys of shape \(1, 2, 12, 8\)"),
    ],
)
def test_what_the_hook_does_not_know_is_refused_by_name(
    keywords: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as raised:
        call_hook(hooked(), **keywords)
    assert "LlamaForCausalLM" in str(raised.value)
    assert "layer 0" in str(raised.value)


@pytest.mark.parametrize(
    "keywords",
    [
        {"position_ids": torch.arange(12)},
        {"use_cache": False},
        {"cache_position": torch.arange(12)},
        {"output_attentions": False},
        {"something_optional": None},
        {"is_causal": True},
        {"softcap": None, "s_aux": None},
    ],
)
def test_keywords_that_change_nothing_pass(keywords: dict[str, Any]) -> None:
    call_hook(hooked(), **keywords)


def test_a_window_layer_whose_window_does_not_arrive_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="window of None tokens, but its config says 8"):
        call_hook(hooked("mistral"), sliding_window=None)


def test_a_module_that_says_it_is_not_causal_is_refused() -> None:
    model = hooked()
    model.attention_modules[0].is_causal = False
    with pytest.raises(UnsupportedModelError, match="later tokens"):
        call_hook(model)


def test_a_layer_that_attends_twice_is_refused() -> None:
    model = hooked()
    layer = model.module.model.layers[1]
    once = layer.self_attn.forward

    def twice(*arguments: Any, **keywords: Any) -> Any:
        once(*arguments, **keywords)
        return once(*arguments, **keywords)

    layer.self_attn.forward = twice
    with pytest.raises(UnsupportedModelError, match="layer 1 attends more than once"):
        packed_logits(model, [prompt_ids(5)])


def test_a_layer_that_bypasses_the_hook_is_noticed() -> None:
    model = hooked()
    attention = model.module.model.layers[2].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UnsupportedModelError, match=r"layers \[2\] never"):
        packed_logits(model, [prompt_ids(5)])


def test_attention_of_an_unknown_module_is_refused() -> None:
    model = hooked()
    delattr(model.attention_modules[1], BINDING)
    with pytest.raises(UnsupportedModelError, match="belongs to no layer"):
        packed_logits(model, [prompt_ids(5)])


def test_modules_that_do_not_fit_the_geometry_are_refused() -> None:
    short = make_config("llama", num_hidden_layers=3)
    short.dtype = "float32"
    geometry = hooked().geometry
    with pytest.raises(UnsupportedModelError, match=r"layer 3 has 0 .* speaks of 1"):
        HookedModel(make_model(short), geometry)
    with pytest.raises(UnsupportedModelError, match=r"layer 3 has 1 .* speaks of 0"):
        HookedModel(hooked().module, read_geometry(short))
