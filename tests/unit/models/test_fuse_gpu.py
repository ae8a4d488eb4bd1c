"""What Triton kernels compute between a layer's products: proven, and like transformers' own code.

On the CPU the kernels run in Triton's interpreter.
"""

import logging
from typing import Any

import pytest
import torch
from tests.packed import packed_logits
from tests.tiny_models import LAYERS, prompt_ids
from tests.unit.models.test_fuse import build

pytest.importorskip("triton")

from kv8.kernels.triton_layer import add_and_norm, gated, norm_rows, rotate
from kv8.models.decoder_parts import _ACTIVATIONS, _NORM_ORDERS
from kv8.models.fuse_gpu import fuse_gpu_model

DTYPES = (torch.float32, torch.bfloat16)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to the last bit of the type, which a sum in another order may change.

    Triton's interpreter cuts off what does not fit bfloat16, where a GPU rounds: some bits more.
    """
    eps = torch.finfo(expected.dtype).eps
    wider = 4 if expected.dtype == torch.bfloat16 else 1
    return torch.allclose(found.float(), expected.float(), rtol=2 * eps * wider, atol=eps * wider)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [0, 1, 2])
def test_norms_of_rows_and_of_heads(order: int, dtype: torch.dtype) -> None:
    for rows, size, heads in ((5, 48, 1), (3, 16, 3)):
        wide = draw(rows, heads * size + 8, dtype=dtype)
        x, weight = wide[:, : heads * size], draw(size, dtype=dtype, seed=1)
        n = x.float().reshape(rows, heads, size)
        n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + 1e-5)
        expected = _NORM_ORDERS[order](weight, n, dtype).view(rows, -1)
        assert close(norm_rows(x, weight, 1e-5, order), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multiplier", [1.0, 0.5])
def test_a_sum_and_its_norm(multiplier: float, dtype: torch.dtype) -> None:
    x, residual = (draw(4, 40, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = draw(40, dtype=dtype, seed=3)
    total, normed = add_and_norm(x, residual, weight, 1e-6, 0, multiplier)
    expected = residual + x * multiplier
    assert close(total, expected)
    assert close(normed, norm_rows(expected, weight, 1e-6, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [16, 8])
def test_the_rotary_embedding(rotary: int, dtype: torch.dtype) -> None:
    wide = draw(6, 3 * 16 + 4, dtype=dtype)
    x = wide[:, : 3 * 16]
    angle = draw(6, rotary // 2, seed=5).repeat(1, 2) * 3
    cosines, sines = angle.cos().to(dtype), angle.sin().to(dtype)
    heads = x.reshape(6, 3, 16).clone()
    turned = heads[..., :rotary]
    half = torch.cat([-turned[..., rotary // 2 :], turned[..., : rotary // 2]], dim=-1)
    heads[..., :rotary] = turned * cosines[:, None] + half * sines[:, None]
    rotate(x, 16, cosines, sines)
    assert close(x, heads.flatten(1))
    assert torch.equal(wide[:, 48:], draw(6, 52, dtype=dtype)[:, 48:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [0, 1])
def test_the_gate(activation: int, dtype: torch.dtype) -> None:
    both = draw(3, 2 * 1500, dtype=dtype) * 4
    gate, up = both.chunk(2, dim=1)
    expected = _ACTIVATIONS[activation](gate.double()).to(dtype) * up
    assert close(gated(gate, up, activation), expected)


@pytest.mark.parametrize(
    ("family", "num_layers"),
    [
        ("gemma3", LAYERS),  # norms after, norms of heads, two kinds of angles
        ("phi3", LAYERS),  # one projection for all
        ("granite", LAYERS),  # a multiplier
        ("mixtral", LAYERS),  # experts
        ("gpt_oss", 0),  # sinks
    ],
)
def test_a_fused_model_computes_the_same(family, num_layers, caplog) -> None:
    caplog.set_level(logging.INFO, "kv8")
    fused, plain = build(family), build(family)
    fuse_gpu_model(fused)
    assert f"{num_layers} of {LAYERS} decoder layers" in caplog.records[-1].getMessage()
    sequences = [prompt_ids(2), prompt_ids(3, seed=1)]
    found, expected = (packed_logits(model, sequences) for model in (fused, plain))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 2e-5 * other.norm()


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2: q, k and v have biases
def test_joined_weights_keep_their_names_and_are_updated_in_place(family: str) -> None:
    """q, k and v are one product, gate and up another; other weights go in by name as before."""
    fused, plain = build(family), build(family)
    with torch.no_grad():
        for number, values in enumerate(plain.module.parameters()):
            values.copy_(draw(*values.shape, seed=number) / values.shape[-1] ** 0.5)
    weights = {name: values.clone() for name, values in fused.module.state_dict().items()}
    fuse_gpu_model(fused)
    found = fused.module.state_dict()
    assert all(torch.equal(found[name], values) for name, values in weights.items())
    storages = {
        name: values.untyped_storage().data_ptr()
        for name, values in found.items()
        if ".layers.0." in name
    }
    for joined in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        weights_of = [n for n in storages if n.endswith("weight") and n.split(".")[-2] in joined]
        assert len(weights_of) == len(joined)
        assert len({storages[name] for name in weights_of}) == 1
    with torch.no_grad():
        for name, values in plain.module.state_dict().items():
            found[name].copy_(values)
    [one], [other] = (packed_logits(model, [prompt_ids(5)]) for model in (fused, plain))
    assert (one - other).norm() < 2e-5 * other.norm()


def test_it_can_be_switched_off() -> None:
    model, plain = build(dtype=torch.bfloat16), build(dtype=torch.bfloat16)
    fuse_gpu_model(model)
    fusion: Any = model.fusion
    with fusion.disabled():
        [own] = packed_logits(model, [prompt_ids(4)])
    assert torch.equal(own, packed_logits(plain, [prompt_ids(4)])[0])


def test_a_layer_of_another_kind_is_left_alone(caplog, monkeypatch) -> None:
    """What the kernels would get wrong fails the proof, and transformers' own code computes it."""
    caplog.set_level(logging.INFO, "kv8")
    monkeypatch.setattr("kv8.models.fused_gpu_layer.gated", lambda gate, up, _: gate * up)
    model = build()
    fuse_gpu_model(model)
    assert f"0 of {LAYERS} decoder layers" in caplog.records[-1].getMessage()
    [found] = packed_logits(model, [prompt_ids(4)])
    [expected] = packed_logits(build(), [prompt_ids(4)])
    assert (found - expected).norm() < 2e-5 * expected.norm()


def test_weights_written_later_count() -> None:
    fused = build()
    fuse_gpu_model(fused)
    plain = build()
    for model in (fused, plain):
        state = model.module.state_dict()
        state["model.layers.2.self_attn.k_proj.weight"].mul_(0.5)
        state["model.layers.1.input_layernorm.weight"].mul_(1.5)
    [found], [expected] = (packed_logits(model, [prompt_ids(4)]) for model in (fused, plain))
    assert (found - expected).norm() < 2e-5 * expected.norm()
