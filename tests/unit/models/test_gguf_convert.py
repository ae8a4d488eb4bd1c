"""A model that went to GGUF and back is the same model; what cannot go back is refused by name."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.tiny_gguf import ARCHITECTURES, VOCAB, byte_level_vocabulary, write_gguf
from tests.tiny_models import make_config, make_model, prompt_ids
from transformers import AutoModelForCausalLM

from kv8.errors import ModelError, UnsupportedModelError
from kv8.models import gguf_weights
from kv8.models.gguf_convert import convert_gguf
from kv8.models.source_folder import check_folder

# What a GGUF file cannot say, because llama.cpp has it built in.
BUILT_IN = {
    "gemma2": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
        "num_hidden_layers": 7,
        "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
    },
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "qwen3_moe": {"norm_topk_prob": True},
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tiny(family="llama", **overrides):
    fields = {"vocab_size": VOCAB} | BUILT_IN.get(family, {}) | overrides
    return make_model(make_config(family, **fields))


def convert(path: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(path, folder)
    check_folder(folder)
    return folder


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([prompt_ids(40)])).logits[0]


def round_trip(model, tmp_path, architecture="llama", **options):
    path = write_gguf(tmp_path / "tiny.gguf", model, architecture, **options)
    folder = convert(path, tmp_path)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), folder


def refused(tmp_path, *words, kind=ModelError, **options):
    model = options.pop("model", None) or tiny()
    path = write_gguf(tmp_path / "tiny.gguf", model, "llama", **options)
    with pytest.raises(kind) as caught:
        convert_gguf(path, tmp_path)
    assert "\n" not in str(caught.value)
    for word in ("tiny.gguf", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_survive_the_round_trip(tmp_path, family):
    model = tiny(family)
    converted, folder = round_trip(model, tmp_path, ARCHITECTURES[family])
    assert type(converted) is type(model)
    assert torch.equal(logits(converted), logits(model))
    stored = json.loads((folder / "config.json").read_text())
    assert stored["dtype"] == "float32"
    assert stored["architectures"] == [type(model).__name__]


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings(tmp_path, tied):
    model = tiny(tie_word_embeddings=tied)
    converted, folder = round_trip(model, tmp_path)
    assert converted.config.tie_word_embeddings is tied
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118
    assert torch.equal(logits(converted), logits(model))


@pytest.mark.parametrize("options", [{"attention_bias": True}, {"mlp_bias": True}])
def test_biases(tmp_path, options):
    model = tiny(**options)
    converted, _ = round_trip(model, tmp_path)
    assert torch.equal(logits(converted), logits(model))


@pytest.mark.parametrize(
    "packing",
    [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16],
)
def test_packed_weights_are_rounded_once(tmp_path, packing):
    model = tiny()
    _, folder = round_trip(model, tmp_path, packing=packing)
    matrix = model.model.layers[0].mlp.up_proj.weight.detach().numpy()
    norm = model.model.layers[0].input_layernorm.weight.detach()
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(matrix, packing), packing))
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = file.get_tensor("model.layers.0.mlp.up_proj.weight")
        assert torch.equal(stored, expected.to(torch.bfloat16))
        stored = file.get_tensor("model.layers.0.input_layernorm.weight")
        assert torch.equal(stored, norm.to(torch.bfloat16))


def test_gemmas_norms_are_rounded_after_the_subtraction(tmp_path):
    model = tiny("gemma2")
    with torch.no_grad():
        model.model.norm.weight.fill_(2.0**-12)  # lost if 1 + it were rounded to bfloat16 first
    packing = gguf.GGMLQuantizationType.Q8_0
    converted, _ = round_trip(model, tmp_path, "gemma2", packing=packing)
    assert torch.equal(converted.model.norm.weight, model.model.norm.weight)


def test_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_weights, "SHARD_BYTES", 100_000)
    model = tiny()
    converted, folder = round_trip(model, tmp_path)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(converted), logits(model))


def test_llama3_rope_is_recognised(tmp_path):
    model = tiny(head_dim=32, rope_parameters=LLAMA3_ROPE)
    default = 1 / 10000.0 ** (torch.arange(0, 32, 2) / 32)
    divisors = (default / model.model.rotary_emb.inv_freq).numpy()
    assert divisors.min() == 1
    assert divisors.max() == 32
    converted, _ = round_trip(model, tmp_path, tensors={"rope_freqs.weight": divisors})
    assert dict(converted.config.rope_parameters) == LLAMA3_ROPE
    assert torch.equal(logits(converted), logits(model))


def test_other_rope_frequencies_are_refused(tmp_path):
    wrong = np.linspace(1, 8, 8).astype(np.float32)
    refused(tmp_path, "rope_freqs.weight", "no known rule", tensors={"rope_freqs.weight": wrong})


def test_linear_rope(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny(rope_parameters=rope)
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    converted, _ = round_trip(model, tmp_path, metadata=metadata)
    assert dict(converted.config.rope_parameters) == rope
    assert torch.equal(logits(converted), logits(model))


@pytest.mark.parametrize("kind", ["yarn", "longrope", "su"])
def test_other_rope_scalings_are_refused(tmp_path, kind):
    refused(
        tmp_path, repr(kind), kind=UnsupportedModelError, metadata={"llama.rope.scaling.type": kind}
    )


def test_numbers_are_those_meant(tmp_path):
    """The file holds float32: 1e-5 is 9.999999747378752e-06 there."""
    converted, _ = round_trip(tiny(rms_norm_eps=1e-5), tmp_path)
    assert converted.config.rms_norm_eps == 1e-5


def test_end_tokens(tmp_path):
    vocabulary = byte_level_vocabulary()
    vocabulary["tokenizer.ggml.tokens"][1] = "<|im_end|>"
    _, folder = round_trip(tiny(), tmp_path, tokenizer=vocabulary)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 1], "pad_token_id": 0}


def test_a_single_end_token(tmp_path):
    _, folder = round_trip(tiny(), tmp_path)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_an_unknown_architecture_is_named(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tiny(), "llama")
    # Of the same length, so that nothing else changes.
    content = path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1)
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*Supported: gemma2, gemma3, granite"):
        convert_gguf(path, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.attention.scale", 0.5),
        ("llama.attention.sliding_window", 8),
        ("llama.expert_shared_count", 1),
        ("llama.a_key_of_the_future", "x"),
    ],
)
def test_metadata_nobody_reads_is_refused(tmp_path, key, value):
    refused(tmp_path, key, kind=UnsupportedModelError, metadata={key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.dimension_count", 8),
        ("llama.attention.value_length", 8),
        ("llama.attention.causal", False),
        ("llama.vocab_size", 99),
        ("llama.expert_used_count", 2),
        ("split.count", 2),
    ],
)
def test_metadata_that_cannot_be_honoured_is_refused(tmp_path, key, value):
    refused(tmp_path, kind=UnsupportedModelError, metadata={key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.embedding_length", None),
        ("llama.context_length", None),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", [4, 4]),
        ("llama.attention.layer_norm_rms_epsilon", None),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.block_count", 2**31),
        ("tokenizer.ggml.eos_token_id", 10**6),
    ],
)
def test_metadata_that_makes_no_sense_is_named(tmp_path, key, value):
    refused(tmp_path, *([] if "block" in key else [key]), metadata={key: value})


@pytest.mark.parametrize("key", ["llama.embedding_length", "llama.feed_forward_length"])
def test_shapes_must_fit_the_metadata(tmp_path, key):
    refused(tmp_path, "shape", metadata={key: 128, "llama.attention.key_length": 16})


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.attention.head_count": 3},
        {"llama.attention.key_length": 7, "llama.attention.value_length": 7},
        {"tokenizer.ggml.bos_token_id": True},
    ],
)
def test_metadata_transformers_cannot_build_from(tmp_path, metadata):
    refused(
        tmp_path, "no valid llama model", metadata=metadata | {"llama.rope.dimension_count": None}
    )


def test_a_missing_tensor_is_named(tmp_path):
    model = tiny()
    state = model.state_dict()
    del state["model.layers.2.mlp.up_proj.weight"]
    model.state_dict = lambda: state
    refused(tmp_path, "blk.2.ffn_up.weight", "mlp.up_proj", model=model)


def test_a_tensor_without_a_place_is_named(tmp_path):
    extra = {"blk.1.attn_q_norm.weight": np.ones(16, np.float32)}
    refused(tmp_path, "blk.1.attn_q_norm.weight", "LlamaForCausalLM", tensors=extra)


def test_too_little_space_is_said_first(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", tiny(), "llama")
    monkeypatch.setattr("kv8.models.gguf_convert._TOKENIZER_BYTES", 2**50)
    with pytest.raises(Exception, match="too full"):
        convert(path, tmp_path)
    assert not list((tmp_path / "converted").iterdir())
