"""Layers computed in one native call: the bits of layers computed apart, or not at all."""

import logging
from typing import Any

import pytest
import torch
from tests.attention_backends import kernels_or_skip
from tests.packed import make_layers, packed_logits
from tests.tiny_models import LAYERS, make_config, make_model, prompt_ids

from kv8.attention.cpu import CpuBackend
from kv8.attention.reference import ReferenceBackend
from kv8.errors import EngineError, UnsupportedModelError
from kv8.kernels.cpu import CpuKernels
from kv8.models.fuse import fuse_model
from kv8.models.fusion import Fusion
from kv8.models.geometry import read_geometry
from kv8.models.hook import HookedModel
from kv8.models.probe import probe_batch

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "granite", "smollm3", "phi3")


@pytest.fixture
def kernels() -> CpuKernels:
    return kernels_or_skip()


class AskedBackend(CpuBackend):
    """Wants to be asked for each layer, as every backend but `CpuBackend` itself."""


def build(family: str, dtype: torch.dtype = torch.float32) -> HookedModel:
    config = make_config(family)
    config.dtype = "float32"
    return HookedModel(make_model(config).to(dtype).requires_grad_(False), read_geometry(config))


def num_calls(model: HookedModel, kernels: CpuKernels, caplog: pytest.LogCaptureFixture) -> str:
    """Fuse; return how the log says that layers are called in decoding."""
    caplog.set_level(logging.INFO, "kv8")
    fuse_model(model, kernels)
    return caplog.records[-1].getMessage().partition("merged; ")[2].partition(")")[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_as_layer_by_layer(
    family: str, dtype: torch.dtype, kernels: CpuKernels, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(family, dtype)
    assert num_calls(model, kernels, caplog) == "decoding in 1 calls"
    sequences = [prompt_ids(90, seed=1), prompt_ids(21, seed=2)]
    caches = [make_layers(model, 111 + 32) for _ in range(2)]
    logits = [
        packed_logits(model, sequences, chunk=7, backend=backend, layers=layers)
        for backend, layers in zip(
            (CpuBackend(kernels), AskedBackend(kernels)), caches, strict=True
        )
    ]
    for found, expected in zip(*logits, strict=True):
        assert torch.equal(found, expected)
        assert found.isfinite().all()
    for one, other in zip(caches[0].values(), caches[1].values(), strict=True):
        assert torch.equal(one.k_codes.view(torch.uint8), other.k_codes.view(torch.uint8))
        assert torch.equal(one.v_codes.view(torch.uint8), other.v_codes.view(torch.uint8))


def test_one_call_a_step(kernels: CpuKernels, native_calls: list[int]) -> None:
    model = build("llama")
    fuse_model(model, kernels)
    assert isinstance(model.fusion, Fusion)
    model.fusion.whole = None  # which is more than a chain: test_whole_step.py
    native_calls.clear()
    packed_logits(model, [prompt_ids(5)], backend=CpuBackend(kernels))
    assert max(native_calls) >= LAYERS * 9
    assert sorted(native_calls)[:-1] == [1, 1]  # the last norm and the output head


def test_a_model_that_looks_in_between_is_left_alone(
    kernels: CpuKernels, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers are passed the tensors of a chain, but something else reads them before the end."""
    model, plain = build("llama"), build("llama")
    for one in (model, plain):
        inner, layers = one.module.model, one.module.model.layers
        layers[0].register_forward_hook(lambda _m, _a, out, inner=inner: add_peak(inner, out))
        inner.norm.register_forward_pre_hook(lambda m, args, inner=inner: (args[0] + inner.peak,))
    assert num_calls(model, kernels, caplog) == "one by one"
    [found] = packed_logits(model, [prompt_ids(9)], backend=CpuBackend(kernels))
    [expected] = packed_logits(plain, [prompt_ids(9)], backend=ReferenceBackend())
    assert (found - expected).norm() < 2e-5 * expected.norm()


def add_peak(inner: Any, out: torch.Tensor) -> None:
    inner.peak = out.abs().max().item()


def test_layers_with_something_between_them_are_two_chains(
    kernels: CpuKernels, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = build("llama"), build("llama")
    for one in (model, plain):
        one.module.model.layers[1].register_forward_pre_hook(lambda _m, args: (args[0] * 1.5,))
    assert num_calls(model, kernels, caplog) == "decoding in 2 calls"
    [found] = packed_logits(model, [prompt_ids(9)], backend=CpuBackend(kernels))
    [expected] = packed_logits(plain, [prompt_ids(9)], backend=ReferenceBackend())
    assert (found - expected).norm() < 2e-5 * expected.norm()


def test_another_input_than_at_load_is_an_error(kernels: CpuKernels) -> None:
    model = build("llama")
    fuse_model(model, kernels)
    handle = model.module.model.layers[1].register_forward_pre_hook(lambda _m, a: (a[0] * 2,))
    with pytest.raises(EngineError, match="Layer 1 was not called with"):
        packed_logits(model, [prompt_ids(9)], backend=CpuBackend(kernels))
    handle.remove()
    # What was noted before the error is forgotten.
    [found] = packed_logits(model, [prompt_ids(9)], backend=CpuBackend(kernels))
    [expected] = packed_logits(model, [prompt_ids(9)], backend=AskedBackend(kernels))
    assert torch.equal(found, expected)


def test_a_layer_attends_once(kernels: CpuKernels) -> None:
    model = build("llama")
    fuse_model(model, kernels)
    batch = probe_batch([3], [3], [3], model.device)
    layers = make_layers(model, 32)
    ids, rows = torch.tensor(prompt_ids(3)), torch.arange(3)
    with model.bound(batch, layers, CpuBackend(kernels)):
        model.forward(ids, rows, rows)
        with pytest.raises(UnsupportedModelError, match="more than once"):
            model.module(input_ids=ids[None], position_ids=rows[None], use_cache=False)
