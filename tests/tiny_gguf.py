"""Small GGUF files made from random transformers models, the way llama.cpp's converter makes them.

Written apart from kv8's conversion, so that the two check each other: rows of rotated projections
are regrouped to pairs, 1 is added to Gemma's norms, fused experts are cut in two.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

# GGUF's architecture for each family of `tiny_models`.
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "granite": "granite",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
}
_PAIRED = ("llama", "granite", "smollm3")
_PLUS_ONE = ("gemma2", "gemma3")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


VOCAB = 4 + 256 + 1


def byte_level_vocabulary(words: tuple[str, ...] = ("ab",)) -> dict[str, Any]:
    """Return the metadata of a byte-level BPE: 4 control tokens, 256 bytes, then ``words``.

    The default makes `VOCAB` tokens; at least one merge is needed for a file to be valid.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *letters]
    merges: list[str] = []
    as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in words:
        spelled = as_letters.pre_tokenize_str(word)[0][0]
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in tokens:
                tokens.append(spelled[:end])
                merges.append(f"{spelled[: end - 1]} {spelled[end - 1]}")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 4 + [NORMAL] * (len(tokens) - 4),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    *,
    packing: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write ``model`` to ``path``; ``metadata`` and ``tensors`` add to or replace what it gives.

    A metadata value of `None` leaves the entry out. Matrices are packed as ``packing``.
    """
    entries = {
        **_metadata(model.config, architecture),
        **(byte_level_vocabulary() if tokenizer is None else tokenizer),
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in entries.items():
        write_entry(writer, key, value)
    for name, values in (_tensors(model, architecture) | dict(tensors or {})).items():
        kind = packing if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        packed = gguf.quantize(values.astype(np.float32), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_entry(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add one metadata entry; `None` adds nothing."""
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    entries: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": head_dim,
        "vocab_size": config.vocab_size,
    }
    if config.model_type in ("mixtral", "qwen3_moe"):
        entries["expert_count"] = getattr(config, "num_local_experts", None) or config.num_experts
        entries["expert_used_count"] = config.num_experts_per_tok
    if config.model_type == "qwen3_moe":
        entries["expert_feed_forward_length"] = config.moe_intermediate_size
    if architecture in ("gemma2", "gemma3", "phi3") and config.sliding_window:
        entries["attention.sliding_window"] = config.sliding_window
    if architecture == "gemma2":
        entries["attn_logit_softcapping"] = config.attn_logit_softcapping
        entries["final_logit_softcapping"] = config.final_logit_softcapping
    if architecture == "phi3":
        entries["rope.scaling.original_context_length"] = config.max_position_embeddings
    if architecture == "granite":
        entries["attention.scale"] = config.attention_multiplier
        entries["embedding_scale"] = config.embedding_multiplier
        entries["residual_scale"] = config.residual_multiplier
        entries["logit_scale"] = config.logits_scaling
    return {f"{architecture}.{key}": value for key, value in entries.items()}


def _tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    config = model.config
    codes = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(codes[architecture], config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.float()
        if architecture in _PAIRED and ".q_proj." in name:
            values = _to_pairs(values, config.num_attention_heads)
        if architecture in _PAIRED and ".k_proj." in name:
            values = _to_pairs(values, config.num_key_value_heads)
        if architecture in _PLUS_ONE and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            gate, up = values.chunk(2, dim=1)
            tensors[f"blk.{layer}.ffn_gate_exps.weight"] = gate.contiguous().numpy()
            tensors[f"blk.{layer}.ffn_up_exps.weight"] = up.contiguous().numpy()
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.endswith("experts.down_proj"):
            target = f"{target}.weight"
        tensors[target] = values.contiguous().numpy()
    return tensors


def _to_pairs(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    half = rows.shape[0] // num_heads // 2
    halves = rows.reshape(num_heads, 2, half, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
