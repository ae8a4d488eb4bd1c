"""Tiny random models of every proven family, written to a folder as a hub checkpoint would be.

Nothing is downloaded: a config, a seed, and a byte-level tokenizer made on the spot. Every model
has 4 layers (`LAYERS`), hidden size 64, 4 query heads and head size 16 unless its family says
otherwise. Weights are drawn so that greedy decoding wanders: the next token depends on the
context, neighbouring logits are far apart, and nothing collapses into one repeated token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS = 4
WINDOW = 8
PAD, BOS, EOS, UNK = range(4)
VOCAB = 4 + 256  # special tokens, then one token a byte

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Family:
    """A kind of model: transformers' name for it, and what its config adds to the common one."""

    model_type: str
    config: dict[str, Any]


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", {}),
    "llama_mha": Family("llama", {"num_key_value_heads": 4}),
    "llama_mqa": Family("llama", {"num_key_value_heads": 1}),
    "qwen2": Family("qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen3": Family("qwen3", {}),
    "mistral": Family("mistral", {"sliding_window": WINDOW}),
    "gemma2": Family(
        "gemma2",
        {
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3": Family(
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "phi3": Family("phi3", {"head_dim": None}),
    "granite": Family(
        "granite",
        {
            "head_dim": None,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "smollm3": Family("smollm3", {"head_dim": None, "no_rope_layers": [1, 0, 1, 0]}),
    "olmo2": Family("olmo2", {"head_dim": None}),
    "qwen3_moe": Family("qwen3_moe", _EXPERTS),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": Family(
        "gpt_oss",
        {
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma3n": Family(
        "gemma3n_text",
        {
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4": Family(
        "gemma4_text",
        {
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
        },
    ),
}

TinyModel = Callable[..., Path]  # what the fixture `tiny_model` gives

# The model of the pitfall tests: 4 layers, hidden 64, 4 query heads, 2 KV heads, head size 16.
T4 = "llama"


def make_config(family: str = T4, **overrides: Any) -> Any:
    """Return the transformers config of a family; ``overrides`` replace its fields."""
    chosen = FAMILIES[family]
    fields = _BASE | chosen.config | overrides
    if fields.get("head_dim") is None:
        fields.pop("head_dim")
    return CONFIG_MAPPING[chosen.model_type](**fields)


def make_model(config: Any, *, seed: int = 2) -> Any:
    """Return a model of ``config`` with weights drawn from ``seed``, in float32, for evaluation."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # some families draw biases and sinks themselves
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed" in name and "proj" not in name:
                parameter.copy_(noise * (0.2 if config.tie_word_embeddings else 0.5))
            elif "lm_head" in name:
                parameter.copy_(noise * 0.4)
            elif "experts" in name and parameter.dim() == 3:
                parameter.copy_(noise * 1.3 * parameter.shape[-2] ** -0.5)
            elif parameter.dim() == 2:
                parameter.copy_(noise * 1.3 * parameter.shape[-1] ** -0.5)
            else:  # norms, biases, sinks: near what the model class chose
                parameter.add_(noise * 0.2)
    return model


def save_model(
    folder: Path,
    family: str = T4,
    *,
    seed: int = 2,
    dtype: torch.dtype = torch.float32,
    edit: Callable[[Any], None] | None = None,
    key_bias_layers: Sequence[int] = (),
    **overrides: Any,
) -> Path:
    """Write a model of ``family`` and its tokenizer to ``folder`` and return ``folder``.

    ``edit`` is called with the model before it is saved. ``key_bias_layers`` get the
    huge key bias of real Qwen2 checkpoints; only families with a key bias (qwen2) take it.
    """
    model = make_model(make_config(family, **overrides), seed=seed)
    for layer in key_bias_layers:
        _set_key_bias(model, layer)
    if edit is not None:
        with torch.no_grad():
            edit(model)
    model.to(dtype)
    model.config.dtype = dtype
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Write the byte-level tokenizer: byte b of UTF-8 text is token ``4 + rank of b``; no merges.

    It puts the begin token in front of a text, and has a small chat template.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    fast.save_pretrained(folder)


def prompt_ids(length: int, *, seed: int = 0) -> list[int]:
    """Return ``length`` random token numbers of bytes (no special tokens)."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(4, VOCAB, (length,), generator=generator).tolist()


def _set_key_bias(model: Any, layer: int) -> None:
    """Give every KV head a bias of 900 in one slowly turning rotary pair, as Qwen2.5 has it.

    What reads the pair is made small, as training makes it, so that the model itself stays sane:
    at scale 1.0 the keys lose their direction when they saturate at 448, while a calibrated FP8
    scale costs little. KL divergence of the next token against float32 over 48 tokens, measured
    for layers 0 and 3 biased: 0.34 at scale 1.0, 0.03 calibrated, 0.001 with both layers skipped.
    """
    attention = model.model.layers[layer].self_attn
    pair, half = 3, attention.head_dim // 2
    with torch.no_grad():
        attention.k_proj.bias.view(-1, attention.head_dim)[:, pair] = 900.0
        for tensor in (attention.q_proj.weight, attention.q_proj.bias):
            heads = tensor.view(-1, attention.head_dim, *tensor.shape[1:])
            heads[:, pair] *= 0.02
            heads[:, pair + half] *= 0.02
