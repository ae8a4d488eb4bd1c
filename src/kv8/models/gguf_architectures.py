"""Which GGUF architectures can be converted, and how each one's metadata becomes a config.

A metadata entry nobody asked for is refused, not skipped: it may change what the model computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kv8.errors import ModelError, UnsupportedModelError
from kv8.models.gguf_file import GGUFFile


@dataclass
class Metadata:
    """The entries of one file that belong to its architecture; remembers which were read."""

    file: GGUFFile
    asked: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        """Return entry ``<architecture>.key``, or ``default``."""
        self.asked.add(key)
        value = self.file.metadata.get(f"{self.file.architecture}.{key}", default)
        # float32 in the file: 1e-5 is meant, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def size(self, key: str, default: int | None = None) -> int:
        """Return entry ``key``, which must be one whole number of at least 1."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(
                f"{self.file.path.name}: {self.file.architecture}.{key} must be a whole number of "
                f"at least 1, got {value!r}."
            )
        return value

    def require(self, key: str, allowed: Any, meaning: str) -> None:
        """Refuse the file unless entry ``key`` is absent or equals ``allowed``."""
        value = self.get(key, allowed)
        if value != allowed:
            raise UnsupportedModelError(
                f"{self.file.path.name}: {self.file.architecture}.{key}={value!r} ({meaning}) "
                f"cannot be converted; only {allowed!r} can."
            )

    def refuse_unread(self) -> None:
        """Refuse entries of the architecture that nobody asked for."""
        prefix = f"{self.file.architecture}."
        keys = (k.removeprefix(prefix) for k in self.file.metadata if k.startswith(prefix))
        unread = sorted(set(keys) - self.asked)
        if unread:
            raise UnsupportedModelError(
                f"{self.file.path.name}: conversion does not know the metadata "
                f"{', '.join(prefix + key for key in unread)}, which may change the result."
            )


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
    extra: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}
    rotary_pairs: bool = False
    norm_plus_one: bool = False


def read_config(file: GGUFFile) -> tuple[Architecture, dict[str, Any]]:
    """Return the architecture of ``file`` and the keywords of its transformers config.

    Raises:
        UnsupportedModelError: the architecture, or something its metadata asks for, is not known.
        ModelError: an entry every model must have is missing or makes no sense.
    """
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None:
        raise UnsupportedModelError(
            f"{file.path.name} has the architecture {file.architecture!r}, which cannot be "
            f"converted. Supported: {', '.join(sorted(ARCHITECTURES))}."
        )
    metadata = Metadata(file)
    config = _common(metadata) | architecture.extra(metadata)
    metadata.refuse_unread()
    return architecture, config


def _common(metadata: Metadata) -> dict[str, Any]:
    file = metadata.file
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelError(f"{file.path.name} holds no token embeddings (token_embd.weight).")
    hidden_size, num_heads = (
        metadata.size("embedding_length"),
        metadata.size("attention.head_count"),
    )
    head_dim = metadata.size("attention.key_length", hidden_size // num_heads)
    metadata.require("attention.value_length", head_dim, "values of another size than keys")
    metadata.require("rope.dimension_count", head_dim, "only a part of each head is rotated")
    metadata.require("vocab_size", embeddings.shape[0], "other than the embeddings' rows")
    return {
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden_size,
        "head_dim": head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", num_heads),
        "num_hidden_layers": metadata.size("block_count"),
        "intermediate_size": metadata.size("feed_forward_length"),
        "max_position_embeddings": metadata.size("context_length"),
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(metadata),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_token_ids(file.metadata),
    }


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int | None]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        f"{ours}_token_id": metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in names.items()
    }


def _rope(metadata: Metadata) -> dict[str, Any]:
    base = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base", 10000.0)}
    kind = metadata.get("rope.scaling.type", "none")
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return base
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": factor}
    raise UnsupportedModelError(
        f"{metadata.file.path.name}: rotary scaling {kind!r} cannot be converted; supported: "
        f"none, linear."
    )


def _has_bias(metadata: Metadata, tensor: str) -> bool:
    return f"blk.0.{tensor}.bias" in metadata.file.tensors


def _llama(metadata: Metadata) -> dict[str, Any]:
    metadata.require("expert_count", 0, "a mixture of experts")
    metadata.require("expert_used_count", 0, "a mixture of experts")
    return {
        "attention_bias": _has_bias(metadata, "attn_q"),
        "mlp_bias": _has_bias(metadata, "ffn_gate"),
    }


def _gemma_scale(metadata: Metadata, *, layers_of_largest: int) -> int:
    # Only the largest model of a generation divides by hidden size / heads; the file does not say.
    if metadata.size("block_count") == layers_of_largest:
        return metadata.size("embedding_length") // metadata.size("attention.head_count")
    return metadata.size("attention.key_length")


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    num_layers = metadata.size("block_count")
    pattern = metadata.size("attention.sliding_window_pattern", 6)
    sliding_base = metadata.get("rope.freq_base_swa", 10000.0)
    return {
        "layer_types": _layer_types(num_layers, pattern),
        "sliding_window": metadata.size("attention.sliding_window"),
        "query_pre_attn_scalar": _gemma_scale(metadata, layers_of_largest=62),
        "rope_parameters": {
            "full_attention": _rope(metadata),
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding_base},
        },
    }


def _layer_types(num_layers: int, pattern: int) -> list[str]:
    """Every ``pattern``-th layer sees everything, the others a window."""
    return [
        "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
        for layer in range(num_layers)
    ]


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, rotary_pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma3": Architecture("gemma3_text", _gemma3, norm_plus_one=True),
}
