"""Steps computed in one native call: the bits of the model's own code around its layers."""

from typing import Any

import pytest
import torch
from tests.attention_backends import kernels_or_skip
from tests.packed import make_layers, packed_logits
from tests.tiny_models import LAYERS, prompt_ids
from tests.unit.models.test_layer_chain import FAMILIES, AskedBackend, build

from kv8.attention.cpu import CpuBackend
from kv8.kernels.cpu import CpuKernels
from kv8.models.fuse import fuse_model
from kv8.models.fusion import Fusion
from kv8.models.hook import HookedModel
from kv8.models.probe import probe_batch
from kv8.models.whole_step import WholeStep
from kv8.models.workspace import Workspace

# The others do something to embeddings or logits, or have angles of two kinds.
WHOLE = ("llama", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
LENGTHS = (23, 7)


@pytest.fixture
def kernels() -> CpuKernels:
    return kernels_or_skip()


def fused(family: str, kernels: CpuKernels, dtype: torch.dtype = torch.float32) -> HookedModel:
    model = build(family, dtype)
    fuse_model(model, kernels)
    return model


def fusion_of(model: HookedModel) -> Fusion:
    assert isinstance(model.fusion, Fusion)
    return model.fusion


def logits_of(model: HookedModel, backend: CpuBackend, *, chunk: int = 5) -> list[torch.Tensor]:
    sequences = [prompt_ids(length, seed=length) for length in LENGTHS]
    layers = make_layers(model, sum(LENGTHS) + 32)
    return packed_logits(model, sequences, chunk=chunk, backend=backend, layers=layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_as_the_models_own_code(
    family: str, dtype: torch.dtype, kernels: CpuKernels
) -> None:
    model = fused(family, kernels, dtype)
    assert isinstance(fusion_of(model).whole, WholeStep) is (family in WHOLE)
    found = logits_of(model, CpuBackend(kernels))
    expected = logits_of(model, AskedBackend(kernels))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


def test_it_is_one_call(kernels: CpuKernels, native_calls: list[int]) -> None:
    model = fused("llama", kernels)
    native_calls.clear()
    packed_logits(model, [prompt_ids(5)], backend=CpuBackend(kernels))
    assert len(native_calls) == 1
    assert native_calls[0] >= LAYERS * 9 + 2


def run_rows(model: HookedModel, kernels: CpuKernels, rows: list[int]) -> torch.Tensor:
    ids = torch.tensor(prompt_ids(6))
    layers = make_layers(model, 32)
    with model.bound(probe_batch([6], [6], [6], model.device), layers, CpuBackend(kernels)):
        return model.forward(ids, torch.arange(6), torch.tensor(rows))


def test_some_logits_are_a_call_of_their_own(kernels: CpuKernels, native_calls: list[int]) -> None:
    model = fused("llama", kernels)
    native_calls.clear()
    everything = run_rows(model, kernels, [0, 1, 2, 3, 4, 5])
    assert len(native_calls) == 1
    for rows in ([5], [5, 4, 3, 2, 1, 0], [1, 1, 2, 3, 4, 5]):
        native_calls.clear()
        assert torch.equal(run_rows(model, kernels, rows), everything[rows])
        assert len(native_calls) == 2
        assert native_calls[1] == 2  # the last norm and the output head
    native_calls.clear()
    assert run_rows(model, kernels, []).shape == (0, everything.shape[1])
    assert len(native_calls) == 1
    often = [0, 1, 2, 3, 4, 5] * 2  # more than there are: the model's own code
    assert torch.equal(run_rows(model, kernels, often), everything[often])
    assert native_calls[-2:] == [1, 1]


def test_steps_of_any_size_in_any_order(kernels: CpuKernels) -> None:
    """The memory that operations are described over grows; few rows come again after many."""
    model = fused("llama", kernels, torch.bfloat16)
    lengths = (9, 70, 5, 2050, 300, 2100, 64, 65)
    sequences = [prompt_ids(length, seed=length) for length in lengths]
    for sequence in sequences:
        found, expected = (
            packed_logits(
                model,
                [sequence],
                chunk=len(sequence),
                backend=backend,
                layers=make_layers(model, len(sequence) + 32),
            )[0]
            for backend in (CpuBackend(kernels), AskedBackend(kernels))
        )
        assert torch.equal(found, expected)
        assert found.isfinite().all()


def test_memory_that_cannot_be_had_is_asked_for_again(
    kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Growing fails here and there, and gets further each time; then it succeeds."""
    model = fused("llama", kernels, torch.bfloat16)
    sequence = prompt_ids(100, seed=1)
    layers = make_layers(model, 150)

    def logits() -> torch.Tensor:
        [found] = packed_logits(
            model, [sequence], chunk=100, backend=CpuBackend(kernels), layers=layers
        )
        return found

    own = Workspace.rows
    for number in (0, 3, 8, 2, 7):
        left = [number]

        def fail(self: Workspace, name: str, width: int, left: list[int] = left) -> torch.Tensor:
            if left[0] == 0:
                raise MemoryError(name)
            left[0] -= 1
            return own(self, name, width)

        monkeypatch.setattr(Workspace, "rows", fail)
        if kernels.has_matrix_unit:  # without one, as many rows are torch's
            with pytest.raises(MemoryError):
                logits()
    monkeypatch.setattr(Workspace, "rows", own)
    found = logits()
    [expected] = packed_logits(
        fused("llama", kernels, torch.bfloat16),
        [sequence],
        chunk=100,
        backend=CpuBackend(kernels),
        layers=make_layers(model, 150),
    )
    assert torch.equal(found, expected)


def test_hooks_are_called(kernels: CpuKernels) -> None:
    model = fused("llama", kernels)
    plain = run_rows(model, kernels, list(range(6)))
    called: list[str] = []
    inner = model.module.model
    handles = [
        inner.norm.register_forward_hook(lambda *_: called.append("norm")),
        inner.embed_tokens.register_forward_pre_hook(lambda *_: called.append("embeddings")),
    ]
    assert torch.equal(run_rows(model, kernels, list(range(6))), plain)
    assert called == ["embeddings", "norm"]
    for handle in handles:
        handle.remove()
    run_rows(model, kernels, list(range(6)))
    assert len(called) == 2


def test_what_was_hooked_when_it_was_loaded_proves_nothing(kernels: CpuKernels) -> None:
    model = build("llama")
    handle = model.module.model.embed_tokens.register_forward_hook(lambda _m, _a, out: out * 2)
    fuse_model(model, kernels)
    assert fusion_of(model).whole is None
    handle.remove()


def test_not_while_the_models_own_code_is_wanted(
    kernels: CpuKernels, native_calls: list[int]
) -> None:
    model = fused("llama", kernels)
    native_calls.clear()
    with fusion_of(model).disabled():
        run_rows(model, kernels, list(range(6)))
    assert native_calls == []


def test_weights_that_are_written_to_count(kernels: CpuKernels) -> None:
    model = fused("llama", kernels)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "norm" in name or "head" in name or "embed" in name:
                parameter.mul_(0.5 + parameter.abs())
    found = logits_of(model, CpuBackend(kernels))
    expected = logits_of(model, AskedBackend(kernels))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_another_output_head_counts(kernels: CpuKernels) -> None:
    model = fused("llama", kernels)
    head = model.module.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().flip(0).contiguous(), requires_grad=False)
    found = logits_of(model, CpuBackend(kernels))
    expected = logits_of(model, AskedBackend(kernels))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_model_that_does_more_is_left_alone(kernels: CpuKernels) -> None:
    """Like one that multiplies its embeddings, as others do outside of the embedding's module."""
    model = build("llama")
    own = model.module.model.forward

    def multiplied(*arguments: Any, **keywords: Any) -> Any:
        output = own(*arguments, **keywords)
        output.last_hidden_state = output.last_hidden_state * 1.5
        return output

    model.module.model.forward = multiplied
    fuse_model(model, kernels)
    assert fusion_of(model).whole is None
    assert all(
        torch.equal(*pair)
        for pair in zip(
            logits_of(model, CpuBackend(kernels)),
            logits_of(model, AskedBackend(kernels)),
            strict=True,
        )
    )
