"""The hooked model against transformers' own forward pass, for every family."""

import pytest
import torch
from tests.packed import PassThroughBackend, packed_logits
from tests.tiny_models import FAMILIES, LAYERS, TinyModel, prompt_ids

from kv8.attention.backend import AttentionCall
from kv8.geometry import LayerGeometry
from kv8.models.config import load_config
from kv8.models.geometry import read_geometry
from kv8.models.hook import HookedModel
from kv8.models.load import load_model
from kv8.models.probe import eager_attention
from kv8.models.source import ModelSource
from kv8.models.verify import verify_model

# Families whose defaults hide a path: windows that a flag turns on or off, models of other makers
# that share an implementation.
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "mistral_full": ("mistral", {"sliding_window": None}),
    "mixtral_window": ("mixtral", {"sliding_window": 8}),
    "phi3_window": ("phi3", {"sliding_window": 8}),
    "qwen2_late_windows": (
        "qwen2",
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "qwen2_huge_key_bias": ("qwen2", {"key_bias_layers": (0, 3)}),
    "gemma3_wide_window": ("gemma3", {"sliding_window": 70}),
    "gpt_oss_yarn": (
        "gpt_oss",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "gemma4_all_own": ("gemma4", {"num_kv_shared_layers": 0}),
}
CASES = {name: (name, {}) for name in FAMILIES} | VARIANTS


def load(tiny_model: TinyModel, case: str, dtype: str = "float32") -> HookedModel:
    family, options = CASES[case]
    folder = tiny_model(family, **options)
    config = load_config(folder)
    source = ModelSource(case, folder, "test")
    return load_model(source, config, read_geometry(config), dtype, verify=False)


def alone(model: HookedModel, sequence: list[int]) -> torch.Tensor:
    """Transformers' own logits, eager, nothing of kv8 in between."""
    model.use_implementation("eager")
    try:
        with torch.no_grad():
            return model.module(torch.tensor([sequence]), use_cache=False).logits[0].float()
    finally:
        model.use_implementation("kv8")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize("chunk", [None, 7, 1])
@pytest.mark.parametrize("case", CASES)
def test_packed_and_chunked_equals_transformers_alone(
    case: str, chunk: int | None, tiny_model: TinyModel
) -> None:
    model = load(tiny_model, case)
    sequences = [prompt_ids(40, seed=1), prompt_ids(17, seed=2), prompt_ids(33, seed=3)]
    found = packed_logits(model, sequences, chunk=chunk)
    for sequence, logits in zip(sequences, found, strict=True):
        # float32 rounding; the largest of all cases and chunks is 3e-6.
        assert relative(logits, alone(model, sequence)) < 2e-5


@pytest.mark.parametrize("case", CASES)
def test_pass_through_attention_is_bit_identical_to_unhooked(
    case: str, tiny_model: TinyModel
) -> None:
    """Habit 20: hooks that change nothing change no bit, and every layer's hook fires once."""
    model = load(tiny_model, case)
    sequence = prompt_ids(40, seed=4)

    def attend(
        geometry: LayerGeometry,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        module = model.attention_modules[geometry.layer]
        p = torch.arange(len(query))
        seen = p[:, None] >= p[None, :]
        if geometry.window is not None:
            seen &= p[None, :] > p[:, None] - geometry.window
        lowest = torch.finfo(query.dtype).min
        mask = torch.where(seen, 0.0, lowest).to(query.dtype)[None, None]
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, key, value))
        extra = {"softcap": call.softcap, "s_aux": call.sinks, "sliding_window": call.window}
        output = eager_attention(module)(
            module, q, k, v, mask, scaling=call.softmax_scale, dropout=0.0, **extra
        )
        return output[0][0]

    backend = PassThroughBackend(attend)
    hooked = packed_logits(model, [sequence], backend=backend)[0]
    assert torch.equal(hooked, alone(model, sequence))
    assert sorted(backend.calls) == list(range(LAYERS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_the_probe_accepts_every_family(case: str, dtype: str, tiny_model: TinyModel) -> None:
    verify_model(load(tiny_model, case, dtype))
