"""Parts of a model replaced by native kernels: only what is proven, and weights stay in place."""

import logging
from typing import Any

import pytest
import torch
from tests.attention_backends import kernels_or_skip
from tests.packed import packed_logits
from tests.tiny_models import LAYERS, make_config, make_model, prompt_ids
from torch import nn

from kv8.kernels.cpu import CpuKernels
from kv8.models.fuse import fuse_model
from kv8.models.geometry import read_geometry
from kv8.models.hook import HookedModel
from kv8.models.merged_weights import Merged
from kv8.models.verify import verify_model


@pytest.fixture
def kernels() -> CpuKernels:
    return kernels_or_skip()


def build(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> HookedModel:
    config = make_config(family, **options)
    config.dtype = "float32"
    return HookedModel(make_model(config).to(dtype).requires_grad_(False), read_geometry(config))


def num_fused(model: HookedModel, kernels: CpuKernels, caplog: pytest.LogCaptureFixture) -> int:
    """Fuse; return how many whole layers the log says were replaced."""
    caplog.set_level(logging.INFO, "kv8")
    fuse_model(model, kernels)
    line = caplog.records[-1].getMessage()
    return int(line.removeprefix("Native kernels compute ").split()[0])


def test_weights_keep_their_names_values_and_memory(kernels: CpuKernels) -> None:
    model = build("qwen2")
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    fuse_model(model, kernels)
    after = model.module.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    attention = model.attention_modules[0]
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    for tensors in ([p.weight for p in parts], [p.bias for p in parts]):
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
        assert tensors[1].data_ptr() == tensors[0].data_ptr() + tensors[0].nbytes
    weights = [m.weight for m in model.module.model.layers.modules() if isinstance(m, nn.Linear)]
    [memory] = {weight.untyped_storage() for weight in weights}
    assert memory.nbytes() == sum(weight.nbytes for weight in weights)
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "olmo2", "mixtral"])
def test_weights_written_later_count(family: str, kernels: CpuKernels) -> None:
    fused, plain = build(family), build(family)
    fuse_model(fused, kernels)
    sequences = [prompt_ids(9), prompt_ids(80, seed=1)]
    packed_logits(fused, sequences)  # whatever is described once is described now
    generator = torch.Generator().manual_seed(5)
    for model in (fused, plain):
        generator.manual_seed(5)
        for _, tensor in sorted(model.module.state_dict().items()):
            tensor.mul_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
    for sequence in sequences:
        [found], [expected] = (packed_logits(model, [sequence]) for model in (fused, plain))
        assert (found - expected).norm() < 2e-5 * expected.norm()


def test_it_can_be_switched_off_and_on(kernels: CpuKernels) -> None:
    model, plain = build(), build()
    fuse_model(model, kernels)
    fusion: Any = model.fusion
    expected = packed_logits(plain, [prompt_ids(30)])[0]
    with fusion.disabled():
        assert torch.equal(packed_logits(model, [prompt_ids(30)])[0], expected)
        assert not any("forward" in vars(module) for module in model.module.modules())
    assert all("forward" in vars(layer) for layer in model.module.model.layers)
    fusion.disable()
    assert torch.equal(packed_logits(model, [prompt_ids(30)])[0], expected)


def test_the_probe_compares_with_transformers_own_code(kernels: CpuKernels) -> None:
    model = build()
    fuse_model(model, kernels)
    seen = []
    layer = type(model.module.model.layers[0])
    with pytest.MonkeyPatch.context() as patch:
        own = layer.forward

        def noted(self: Any, *args: Any, **keywords: Any) -> Any:
            seen.append(self)
            return own(self, *args, **keywords)

        patch.setattr(layer, "forward", noted)
        verify_model(model)
    assert len(seen) == 2 * LAYERS  # each of the two sequences on its own; packed they are fused


def test_more_than_one_layer_kind(kernels: CpuKernels, caplog: pytest.LogCaptureFixture) -> None:
    """Layers without rotary embedding are told apart by running them."""
    assert num_fused(build("smollm3"), kernels, caplog) == LAYERS


def scale_output(layer: nn.Module) -> None:
    """Make a layer compute something that none of its modules shows."""
    kind: Any = type(layer)

    class Scaled(kind):
        def forward(self, *args: Any, **keywords: Any) -> torch.Tensor:
            return super().forward(*args, **keywords) * 1.001

    layer.__class__ = Scaled


def add_module(layer: nn.Module) -> None:
    layer.gate = nn.Linear(4, 4)


def add_parameter(layer: nn.Module) -> None:
    layer.scalar = nn.Parameter(torch.ones(1))


def another_norm(layer: nn.Module) -> None:
    layer.input_layernorm = nn.LayerNorm(64)


def another_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.Sigmoid()


def hidden_bias(layer: Any) -> None:
    """A projection that is more than its weight."""

    class Shifted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.1

    layer.self_attn.o_proj.__class__ = Shifted


@pytest.mark.parametrize(
    "change",
    [scale_output, add_module, add_parameter, another_norm, another_activation, hidden_bias],
)
def test_a_layer_of_another_kind_is_left_alone(
    change: Any, kernels: CpuKernels, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = build(), build()
    for one in (model, plain):
        change(one.module.model.layers[1])
    fused = num_fused(model, kernels, caplog)
    # With an unknown MLP the rest of the layer is still known.
    assert fused == (LAYERS if change is another_activation else LAYERS - 1)
    for length in (9, 80):
        [found], [expected] = (packed_logits(m, [prompt_ids(length)]) for m in (model, plain))
        assert (found - expected).norm() < 2e-5 * expected.norm()


def test_biases_where_only_some_projections_have_one() -> None:
    linears = [nn.Linear(8, 3), nn.Linear(8, 5, bias=False)]
    x = torch.randn(4, 8)
    expected = torch.cat([linear(x) for linear in linears], dim=1)
    merged = Merged(linears)
    found = torch.empty(4, 8)
    merged.multiply(x, found)
    assert torch.allclose(found, expected, atol=1e-6)
    linears[0].bias.data.fill_(1.0)
    assert merged.bias is not None
    assert merged.bias.tolist() == [1.0] * 3 + [0.0] * 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "granite"]
)
def test_16_bits_round_where_transformers_rounds(
    family: str, dtype: torch.dtype, kernels: CpuKernels
) -> None:
    """Fused and own code differ by no more than own code does from itself, run in other chunks."""
    fused, plain = build(family, dtype), build(family, dtype)
    fuse_model(fused, kernels)
    sequence = [prompt_ids(48, seed=3)]
    [whole], [chunked] = (packed_logits(plain, sequence, chunk=chunk) for chunk in (None, 5))
    [found] = packed_logits(fused, sequence, chunk=5)
    noise = (whole - chunked).norm() / whole.norm()
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    # Where chunks happen to change nothing, one step in each of the layers' few roundings.
    assert (found - chunked).norm() / whole.norm() <= 2 * noise + 2 * LAYERS * step
