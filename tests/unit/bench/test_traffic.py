"""Bytes and operations by formula, against what the model and its cache really hold."""

import pytest
import torch
from tests.tiny_models import TinyModel

from kv8.bench.traffic import code_bytes, decode_bytes, prefill_flop
from kv8.engine.resolve import ResolvedConfig, resolve_options
from kv8.models.step_work import read_step_work
from kv8.options import EngineOptions


def resolved(folder: object, dtype: str = "fp8") -> ResolvedConfig:
    return resolve_options(EngineOptions(model=str(folder), kv_cache_dtype=dtype))  # type: ignore[arg-type]


def test_weights_are_counted_once_and_tables_only_as_heads(tiny_model: TinyModel) -> None:
    hidden, heads, kv_heads, head_dim, between, layers, vocab = 64, 4, 2, 16, 96, 4, 260
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    per_layer = attention + 3 * hidden * between
    work = read_step_work(resolved(tiny_model("llama")).model_config)
    assert work is not None
    assert work.per_token == layers * per_layer
    assert work.per_logits == vocab * hidden
    assert work.weights_read == work.per_token + work.per_logits + (2 * layers + 1) * hidden


def test_a_tied_table_is_read_as_head(tiny_model: TinyModel) -> None:
    work = read_step_work(resolved(tiny_model("qwen2")).model_config)
    assert work is not None
    assert work.per_logits == 260 * 64
    assert work.weights_read > work.per_token + work.per_logits


def test_experts_have_no_formula(tiny_model: TinyModel) -> None:
    for family in ("qwen3_moe", "mixtral", "gpt_oss"):
        assert read_step_work(resolved(tiny_model(family)).model_config) is None


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma3n"])
def test_operations_are_those_torch_counts(family: str, tiny_model: TinyModel) -> None:
    """Torch counts the products of a forward pass, but sees attention as if nothing was masked."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    config = resolved(tiny_model(family))
    work = read_step_work(config.model_config)
    assert work is not None
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family), attn_implementation="eager")
    counts = {}
    for length in (8, 16):
        tokens = torch.arange(length).unsqueeze(0)
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            model(tokens, use_cache=False, logits_to_keep=1)
        unmasked = sum(
            4 * layer.num_heads * layer.head_dim * length * length
            for layer in config.geometry.layers
        )
        counts[length] = counted.get_total_flops() - unmasked
    linear = {n: 2 * (work.per_token * n + work.per_logits) for n in counts}
    # Rotary tables are a small matrix product, too; it and nothing else may differ.
    assert all(0 <= counts[n] - linear[n] <= 0.02 * linear[n] for n in counts)


def test_attention_is_causal_and_sees_its_window(tiny_model: TinyModel) -> None:
    config = resolved(tiny_model("gemma3"))
    work = read_step_work(config.model_config)
    assert work is not None
    length = 20
    pairs = sum(
        min(position + 1, layer.window or length)
        for layer in config.geometry.layers
        for position in range(length)
    )
    dense = 2 * (work.per_token * length + work.per_logits)
    assert prefill_flop(config, work, length) == dense + 4 * 4 * 16 * pairs


def test_codes_read_are_those_a_sequence_holds(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama")
    for dtype, size in (("fp8", 1), ("bfloat16", 2), ("float32", 4)):
        config = resolved(folder, dtype)
        assert code_bytes(config, 100) == 100 * 4 * (2 * 2 * 16) * size
        assert code_bytes(config, 1) == config.layout.bytes_per_token
    windowed = resolved(tiny_model("gemma3"))
    assert code_bytes(windowed, 100) == (3 * 8 + 100) * 2 * 2 * 16


def test_a_step_reads_weights_once_and_codes_of_each_sequence(tiny_model: TinyModel) -> None:
    config = resolved(tiny_model("llama"))
    work = read_step_work(config.model_config)
    assert work is not None
    assert config.dtype == "float32"
    expected = 4 * work.weights_read + 2 * code_bytes(config, 10) + code_bytes(config, 7)
    assert decode_bytes(config, work, [10, 7, 10]) == expected
