"""Which GGUF architectures can be converted, and how each one's metadata becomes a config.

A metadata entry nobody asked for is refused, not skipped: it may change what the model computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kv8.errors import ModelError, UnsupportedModelError
from kv8.models.gguf_file import GGUFFile
from kv8.models.gguf_metadata import ArchitectureMetadata
from kv8.models.gguf_rope import read_rope


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture maps to a transformers model.

    Attributes:
        model_type: name in transformers (``llama``).
        extra: builds the config entries beyond those every model has.
        rotary_pairs: rows of the query and key projections are stored as the pairs that are
            rotated together; transformers keeps the two halves of a head apart.
        norm_plus_one: norm weights are stored with 1 added.
    """

    model_type: str
    extra: Callable[[ArchitectureMetadata], dict[str, Any]] = lambda metadata: {}
    rotary_pairs: bool = False
    norm_plus_one: bool = False


def read_config(file: GGUFFile) -> tuple[Architecture, dict[str, Any]]:
    """Return the architecture of ``file`` and the keywords of its transformers config.

    Raises:
        UnsupportedModelError: the architecture, or something its metadata asks for, is not known.
        ModelError: an entry every model must have is missing or makes no sense.
    """
    architecture = ARCHITECTURES.get(file.architecture)
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(
            f"{file.path.name} is one of {file.metadata['split.count']} parts of a model. Merge "
            f"them first (llama-gguf-split --merge)."
        )
    if architecture is None:
        raise UnsupportedModelError(
            f"{file.path.name} has the architecture {file.architecture!r}, which cannot be "
            f"converted. Supported: {', '.join(sorted(ARCHITECTURES))}."
        )
    metadata = ArchitectureMetadata(file)
    # Mixtral has no name of its own: it is a llama with experts.
    if file.architecture == "llama" and metadata.get("expert_count", 0):
        architecture = _MIXTRAL
    config = _common(metadata) | architecture.extra(metadata)
    metadata.refuse_unread()
    return architecture, config


def _common(metadata: ArchitectureMetadata) -> dict[str, Any]:
    """Entries every supported model has."""
    file = metadata.file
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelError(f"{file.path.name} holds no token embeddings (token_embd.weight).")
    num_layers = metadata.size("block_count")
    if not any(name.startswith(f"blk.{num_layers - 1}.") for name in file.tensors):
        raise ModelError(f"{file.path.name} says it has {num_layers} layers, but lacks the last.")
    hidden_size = metadata.size("embedding_length")
    num_heads = metadata.size("attention.head_count")
    head_dim = metadata.size("attention.key_length", hidden_size // num_heads)
    metadata.require("attention.value_length", head_dim, "values of another size than keys")
    metadata.require("attention.causal", True, "no decoder")
    metadata.require("vocab_size", embeddings.shape[0], "other than the embeddings' rows")
    return {
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden_size,
        "head_dim": head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", num_heads),
        "num_hidden_layers": num_layers,
        "intermediate_size": metadata.size("feed_forward_length"),
        "max_position_embeddings": metadata.size("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": read_rope(metadata, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_token_ids(file, embeddings.shape[0]),
    }


def _token_ids(file: GGUFFile, vocab_size: int) -> dict[str, int | None]:
    ids: dict[str, int | None] = {}
    for ours, theirs in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        token = file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if token is not None and (not isinstance(token, int) or not 0 <= token < vocab_size):
            raise ModelError(
                f"{file.path.name}: tokenizer.ggml.{theirs}_token_id={token!r} is no token; they "
                f"go from 0 to {vocab_size - 1}."
            )
        ids[f"{ours}_token_id"] = token
    return ids


def _llama(metadata: ArchitectureMetadata) -> dict[str, Any]:
    metadata.require("expert_used_count", 0, "a mixture of experts without experts")
    return _biases(metadata)


def _biases(metadata: ArchitectureMetadata) -> dict[str, Any]:
    tensors = metadata.file.tensors
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def _mixtral(metadata: ArchitectureMetadata) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
    }


def _qwen3_moe(metadata: ArchitectureMetadata) -> dict[str, Any]:
    return {
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        # Not in the file: this architecture always normalizes the chosen experts' weights.
        "norm_topk_prob": True,
    }


def _gemma2(metadata: ArchitectureMetadata) -> dict[str, Any]:
    return {
        "layer_types": _layer_types(metadata, pattern=2),
        "sliding_window": metadata.size("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _gemma_scale(metadata, layers_of_largest=46),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: ArchitectureMetadata) -> dict[str, Any]:
    metadata.get("mm.tokens_per_image")  # of the image encoder, which is another file
    sliding_base = metadata.number("rope.freq_base_swa", 10000.0)
    return {
        "layer_types": _layer_types(metadata, pattern=6),
        "sliding_window": metadata.size("attention.sliding_window"),
        "query_pre_attn_scalar": _gemma_scale(metadata, layers_of_largest=62),
        "rope_parameters": {
            "full_attention": read_rope(metadata, metadata.size("attention.key_length")),
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding_base},
        },
    }


def _gemma_scale(metadata: ArchitectureMetadata, *, layers_of_largest: int) -> int:
    # Only the largest model of a generation divides by hidden size / heads; the file does not say.
    if metadata.size("block_count") == layers_of_largest:
        return metadata.size("embedding_length") // metadata.size("attention.head_count")
    return metadata.size("attention.key_length")


def _layer_types(metadata: ArchitectureMetadata, pattern: int) -> list[str]:
    """Every ``pattern``-th layer sees everything, the others a window."""
    pattern = metadata.size("attention.sliding_window_pattern", pattern)
    return [
        "full_attention" if number % pattern == 0 else "sliding_attention"
        for number in range(1, metadata.size("block_count") + 1)
    ]


def _phi3(metadata: ArchitectureMetadata) -> dict[str, Any]:
    metadata.get("rope.scaling.original_context_length")  # written even where nothing is scaled
    no_window = metadata.get("attention.sliding_window", 0) == 0
    return {
        "sliding_window": None if no_window else metadata.size("attention.sliding_window"),
        "original_max_position_embeddings": metadata.size("context_length"),
    }


def _granite(metadata: ArchitectureMetadata) -> dict[str, Any]:
    return {
        **_biases(metadata),
        "attention_multiplier": metadata.number("attention.scale"),
        "embedding_multiplier": metadata.number("embedding_scale"),
        "residual_multiplier": metadata.number("residual_scale"),
        "logits_scaling": metadata.number("logit_scale"),
    }


_MIXTRAL = Architecture("mixtral", _mixtral, rotary_pairs=True)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, rotary_pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe),
    "gemma2": Architecture("gemma2", _gemma2, norm_plus_one=True),
    "gemma3": Architecture("gemma3_text", _gemma3, norm_plus_one=True),
    "phi3": Architecture("phi3", _phi3),
    "granite": Architecture("granite", _granite, rotary_pairs=True),
    "smollm3": Architecture("smollm3", _biases, rotary_pairs=True),
    "olmo2": Architecture("olmo2"),
}
