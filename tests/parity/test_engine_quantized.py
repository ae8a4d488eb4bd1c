"""The quantized engine is the model itself, its keys and values rounded to the format and back.

The oracle is transformers' own attention code with K and V replaced by ``decode(encode(x))``: none
of kv8's formats, cache or attention. The engine may differ from it by float rounding, and by codes
that float rounding carried over a rounding boundary: bounds as in `test_engine_equivalence`.
"""

import math
import sys
from functools import cache

import pytest
import torch
from tests.engines import start_engine, teacher_forced
from tests.tiny_models import prompt_ids
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask

FLOAT_ROUNDING = 1e-4
RANGES = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}
IDS = prompt_ids(70, seed=11)


def rounded(values, scale, name):
    """Return [1, K, T, D] rounded to the format; ``scale`` is a number, or one a head."""
    dtype, largest = RANGES[name]
    scale = torch.tensor(scale, dtype=torch.float32).reshape(1, -1, 1, 1)
    return (values / scale).clamp(-largest, largest).to(dtype).float() * scale


@cache  # one for all scales
def unrounded(folder):
    """Return log probabilities [T, V] of transformers with keys and values as they are."""
    return oracle(folder, "fp8_e4m3", {})


def oracle(folder, kv_cache_dtype, scales):
    """Return log probabilities [T, V] of transformers with rounded keys and values."""

    def attend(module, query, key, value, attention_mask, **keywords):
        number = module.layer_idx
        if number in scales:
            key = rounded(key, scales[number]["k"], kv_cache_dtype)
            value = rounded(value, scales[number]["v"], kv_cache_dtype)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, attention_mask, **keywords)

    return through(folder, attend)


def through(folder, attend):
    """Return log probabilities [T, V] of transformers attending through ``attend``."""
    AttentionInterface.register("rounded", attend)
    AttentionMaskInterface.register("rounded", eager_mask)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="rounded"
    ).eval()
    with torch.no_grad():
        logits = model(torch.tensor([IDS]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("kv_cache_dtype", RANGES)
@pytest.mark.parametrize("kind", ["default", "tensor", "head"])
def test_quantized_engine_equals_rounded_transformers(
    kind, kv_cache_dtype, family, tiny_model
) -> None:
    """Pitfalls 7, 26, 33: each layer's own K and V scales, per tensor and per head, take effect."""
    folder = tiny_model(family)
    scales = {
        "default": {n: {"k": 1.0, "v": 1.0} for n in range(4)},
        "tensor": {n: {"k": 0.01 * 3**n, "v": 0.3 / 2**n} for n in range(4)},
        "head": {n: {"k": [0.004, 0.4], "v": [0.7 / (n + 1), 0.01]} for n in range(4)},
    }[kind]
    given = None if kind == "default" else scales
    engine = start_engine(folder, kv_cache_dtype=kv_cache_dtype, kv_scales=given)
    expected = oracle(folder, kv_cache_dtype, scales)
    noise = float((expected - unrounded(folder)).abs().max())
    assert noise > 10 * FLOAT_ROUNDING  # quantization shows, so the comparison means something
    for chunks in ([70], [20, 1]):
        gap = (teacher_forced(engine, IDS, chunks=chunks) - expected).abs()
        assert gap.max() < max(FLOAT_ROUNDING, noise / 4), chunks


def test_skipped_layers_keep_their_keys_and_values(tiny_model) -> None:
    folder = tiny_model("llama")
    scales = {n: {"k": 0.05, "v": 0.05} for n in (0, 3)}
    engine = start_engine(
        folder, kv_cache_dtype="fp8", kv_scales=scales, kv_cache_dtype_skip_layers="1-2"
    )
    expected = oracle(folder, "fp8_e4m3", scales)
    noise = float((expected - unrounded(folder)).abs().max())
    gap = (teacher_forced(engine, IDS, chunks=[70]) - expected).abs().max()
    assert gap < max(FLOAT_ROUNDING, noise / 4)


def fp8_attention(folder, scales):
    """Return log probabilities [T, V] of transformers with queries and weights rounded as well."""

    def attend(module, query, key, value, attention_mask, *, scaling, **_):
        given = scales[module.layer_idx]
        query = rounded(query, given["q"], "fp8_e4m3")
        key = rounded(key, given["k"], "fp8_e4m3").repeat_interleave(2, dim=1)
        value = rounded(value, given["v"], "fp8_e4m3").repeat_interleave(2, dim=1)
        logits = (query @ key.transpose(2, 3) * scaling + attention_mask) / math.log(2)
        weights = torch.exp2(logits - logits.amax(-1, keepdim=True).ceil())
        output = rounded(weights, 2.0**-8, "fp8_e4m3") @ value / weights.sum(-1, keepdim=True)
        return output.transpose(1, 2).contiguous(), None

    return through(folder, attend)


@pytest.mark.parametrize("q", [0.02, [0.005, 0.02, 0.08, 0.01]])
def test_fp8_attention_equals_transformers_with_everything_rounded(q, tiny_model) -> None:
    """Pitfalls 25, 26: q scales, one or one a head, reach prefill, chunks and decode alike."""
    folder = tiny_model("llama")
    scales = {n: {"q": q, "k": [0.01 * 2**n, 0.03], "v": 0.02} for n in range(4)}
    engine = start_engine(folder, kv_cache_dtype="fp8", kv_scales=scales)
    assert engine.config.fp8_queries
    native = start_engine(folder, kv_cache_dtype="fp8", kv_scales=scales, query_dtype="native")
    expected = fp8_attention(folder, scales)
    # What rounding of queries and weights adds; the comparison must see it.
    noise = float((expected - teacher_forced(native, IDS, chunks=[70])).abs().max())
    assert noise > 10 * FLOAT_ROUNDING
    for chunks in ([70], [20, 1], [7]):
        gap = (teacher_forced(engine, IDS, chunks=chunks) - expected).abs()
        assert gap.max() < max(FLOAT_ROUNDING, noise / 4), chunks
