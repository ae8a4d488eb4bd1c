"""The probe at load: structural mistakes fail it, rounding does not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.packed import packed_logits
from tests.tiny_models import FAMILIES, make_config, make_model, prompt_ids

from kv8.attention.reference import ReferenceBackend
from kv8.errors import UnsupportedModelError
from kv8.geometry import ModelGeometry
from kv8.models.geometry import read_geometry
from kv8.models.hook import HookedModel
from kv8.models.verify import verify_model


def build(
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    geometry: Callable[[ModelGeometry], ModelGeometry] = lambda g: g,
    **overrides: Any,
) -> HookedModel:
    config = make_config(family, **overrides)
    config.dtype = "float32"
    return HookedModel(make_model(config).to(dtype), geometry(read_geometry(config)))


def with_layer(number: int, **changes: Any) -> Callable[[ModelGeometry], ModelGeometry]:
    def change(geometry: ModelGeometry) -> ModelGeometry:
        layers = list(geometry.layers)
        layers[number] = replace(layers[number], **changes)
        return replace(geometry, layers=tuple(layers))

    return change


def test_a_layer_that_adds_nothing_is_served() -> None:
    model = build()
    torch.nn.init.zeros_(model.module.model.layers[2].self_attn.v_proj.weight)
    verify_model(model)


def test_tokens_that_mix_outside_of_attention() -> None:
    """A convolution over the packed tokens, as Mamba and short-conv layers have."""
    model = build()
    mlp = model.module.model.layers[2].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(x + 0.3 * torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1))
    with pytest.raises(UnsupportedModelError, match="meet outside of attention"):
        verify_model(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_angles_that_depend_on_the_batch(dtype: torch.dtype) -> None:
    """Dynamic scaling is refused by name; the probe catches it without the name, too."""
    rope = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
    config = make_config("llama", rope_parameters=rope, max_position_embeddings=64)
    config.dtype = "float32"
    plain = make_config("llama")
    plain.dtype = "float32"
    geometry = replace(read_geometry(plain), max_position=512)
    with pytest.raises(UnsupportedModelError, match="probe tokens"):
        verify_model(HookedModel(make_model(config).to(dtype), geometry))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_a_window_that_differs_from_the_config(family: str) -> None:
    model = build(family, geometry=with_layer(0, window=9))
    with pytest.raises(UnsupportedModelError, match="layer 0 attends within a window of 8"):
        verify_model(model)


def test_a_window_only_the_mask_knows_of() -> None:
    """The module passes no window; the mask transformers builds for it has one."""
    model = build("gemma3", geometry=with_layer(1, window=None))
    model.attention_modules[1].sliding_window = None
    with pytest.raises(UnsupportedModelError, match="layer 1 attends differently"):
        verify_model(model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_heads": 4}, "layer 3 has keys of shape"),
        ({"num_heads": 8}, "layer 3 has queries of shape"),
        ({"head_dim": 32}, "layer 3 has queries of shape"),
    ],
)
def test_heads_that_differ_from_the_config(changes: dict[str, int], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        verify_model(build(geometry=with_layer(3, **changes)))


def test_a_shared_layer_read_from_the_wrong_source() -> None:
    model = build("gemma4", num_hidden_layers=6, layer_types=None, num_kv_shared_layers=0)
    verify_model(model)
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    wrong = build(
        "gemma4",
        num_hidden_layers=6,
        layer_types=types,
        num_kv_shared_layers=3,
        geometry=with_layer(3, kv_source=0),
    )
    with pytest.raises(UnsupportedModelError, match="probe tokens"):
        verify_model(wrong)


def test_an_addition_to_the_scores_that_no_keyword_tells_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers.models.llama.modeling_llama as llama

    plain = llama.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, mask: Any, **rest: Any) -> Any:
        distance = torch.arange(key.shape[2]) * 0.1
        return plain(module, query, key, value, mask + distance, **rest)

    monkeypatch.setattr(llama, "eager_attention_forward", biased)
    with pytest.raises(UnsupportedModelError, match="layer 0 attends differently"):
        verify_model(build())


def test_positions_that_a_model_counts_itself() -> None:
    """Learned positions that ignore the positions given would number a packed batch through."""
    model = build()
    rotary = model.module.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids: plain(x, torch.arange(x.shape[1]).unsqueeze(0))
    with pytest.raises(UnsupportedModelError, match="probe tokens"):
        verify_model(model)


def test_what_a_backend_gets_wrong_shows_before_anything_is_served() -> None:
    """Pitfall 56: sinks, caps and windows are tried at load, not by the first request."""

    class NoSinks(ReferenceBackend):
        def attend(self, layer: Any, query: Any, batch: Any, call: Any) -> torch.Tensor:
            return super().attend(layer, query, batch, replace(call, sinks=None))

    verify_model(build("gpt_oss"))
    with pytest.raises(UnsupportedModelError, match="layer 0 attends differently"):
        verify_model(build("gpt_oss"), NoSinks())


def test_a_model_that_cannot_run_a_packed_batch_is_refused_in_one_line() -> None:
    model = build()
    model.module.model.layers[0].mlp.forward = lambda x: x.view(3, -1)
    with pytest.raises(UnsupportedModelError, match="fails in it with RuntimeError"):
        verify_model(model)


def test_a_failed_probe_leaves_the_model_usable() -> None:
    model = build(geometry=with_layer(0, num_kv_heads=4))
    with pytest.raises(UnsupportedModelError):
        verify_model(model)
    right = HookedModel(model.module, build().geometry)
    verify_model(right)
    assert packed_logits(right, [prompt_ids(9)])[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_chosen_differently_in_16_bits_do_not_fail_it(
    family: str, seed: int, dtype: torch.dtype
) -> None:
    config = make_config(family, num_hidden_layers=12, layer_types=None)
    config.dtype = "float32"
    verify_model(HookedModel(make_model(config, seed=seed).to(dtype), read_geometry(config)))


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_of_another_order_of_summation_does_not_fail_it(family: str) -> None:
    """Perturb every layer's output by half a bfloat16 step: as much as any kernel may differ."""
    model = build(family, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)

    def disturb(_module: Any, _args: Any, output: Any) -> Any:
        hidden = output if torch.is_tensor(output) else output[0]
        noise = torch.rand(hidden.shape, generator=generator) - 0.5
        changed = (hidden.float() * (1 + noise * 2**-8)).to(hidden.dtype)
        return changed if torch.is_tensor(output) else (changed, *output[1:])

    for layer in model.module.model.layers:
        layer.register_forward_hook(disturb)
    verify_model(model)
