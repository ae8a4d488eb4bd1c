"""What kv8 cannot serve correctly, told from the config and the model class, before any weights.

Lists of what is known to work, not of what is known to fail: a new kind of layer or rotary
embedding is refused until somebody has thought about it. `kv8.models.verify` is the second net:
it runs the loaded model.
"""

from collections.abc import Iterator
from typing import Any

from kv8.errors import UnsupportedModelError
from kv8.models.config import layer_config, model_class, text_config

FULL, SLIDING = "full_attention", "sliding_attention"
SERVED_LAYER_TYPES = (FULL, SLIDING)

# Rotary embeddings whose angles depend on a token's own position and nothing else. Others choose
# them by the longest sequence of a batch ("dynamic", "longrope"), so that in a packed batch one
# request would change the answers to all others.
_SERVED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")

_LAYER_TYPE_REASONS = {
    "linear_attention": "keeps a recurrent state in place of keys and values",
    "hybrid": "keeps a recurrent state beside its keys and values",
    "hybrid_sliding": "keeps a recurrent state beside its keys and values",
    "conv": "mixes neighbouring tokens outside of attention",
    "chunked_attention": "attends within fixed chunks of the sequence",
    "indexed_attention": "chooses which tokens to attend to by an index",
    "compressed_sparse_attention": "stores compressed keys and values",
    "heavily_compressed_attention": "stores compressed keys and values",
}


def refuse_unservable(config: Any) -> None:
    """Raise if the model of ``config`` has a part kv8 cannot serve correctly.

    Raises:
        UnsupportedModelError: names the model, the part and the reason.
    """
    text = text_config(config)
    for reason in _reasons(config, text):
        built = model_class(config)
        name = built.__name__ if built else (config.architectures or [type(config).__name__])[0]
        raise UnsupportedModelError(
            f"kv8 cannot serve {name} ({config.model_type}) correctly: {reason}."
        )


def _reasons(config: Any, text: Any) -> Iterator[str]:
    """Yield every reason against the model, the most telling first."""
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        yield "it is an encoder-decoder, and kv8 serves decoder-only models"
    yield from _unservable_layers(text)
    yield from _unservable_attention(text)
    yield from _unservable_rope(text)
    built = model_class(config)
    if built is None:
        yield (
            "transformers has no causal language model for it (AutoModelForCausalLM does not know "
            f"{type(config).__name__})"
        )
    if getattr(built, "_is_stateful", False):
        yield "some of its layers keep a recurrent state in place of keys and values"
    if not _uses_attention_interface(built):
        yield (
            "its implementation in transformers does not go through the attention interface, so "
            "nothing else can keep its keys and values"
        )


def _unservable_attention(text: Any) -> Iterator[str]:
    if getattr(text, "kv_lora_rank", None) is not None:
        yield (
            "it uses multi-head latent attention (kv_lora_rank), whose cache holds one latent row "
            "for keys and values together, with scale rules of its own"
        )
    if getattr(text, "add_cross_attention", False) or getattr(text, "cross_attention_layers", None):
        yield "it attends to a second sequence (cross-attention)"
    if getattr(text, "alibi", False):
        yield "it adds a bias to attention by distance (ALiBi)"
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        yield "its tokens see later tokens (use_bidirectional_attention)"
    if getattr(text, "is_causal", True) is False:
        yield "its tokens see later tokens (is_causal is false)"
    first = layer_config(text, 0)
    value_size, key_size = getattr(first, "v_head_dim", None), getattr(first, "head_dim", None)
    if value_size is not None and key_size is not None and value_size != key_size:
        yield f"its values are {value_size} wide and its keys {key_size}; kv8 stores equal widths"


def _unservable_layers(text: Any) -> Iterator[str]:
    for number, layer_type in enumerate(getattr(text, "layer_types", None) or ()):
        if layer_type not in SERVED_LAYER_TYPES:
            why = _LAYER_TYPE_REASONS.get(layer_type)
            detail = f", which {why}" if why else ""
            yield (
                f"layer {number} is of type {layer_type!r}{detail}; kv8 serves layers of type "
                f"{' and '.join(SERVED_LAYER_TYPES)}"
            )
    if getattr(text, "attention_chunk_size", None):
        yield "it attends within fixed chunks of the sequence (attention_chunk_size)"


def _unservable_rope(text: Any) -> Iterator[str]:
    for rope_type in rope_types(text):
        if rope_type not in _SERVED_ROPE_TYPES:
            yield (
                f"its rotary embedding is of type {rope_type!r}. Served are those whose angles "
                f"depend on the token's own position alone: {', '.join(_SERVED_ROPE_TYPES)}. With "
                f"'dynamic' and 'longrope' one long request would change the answers of all "
                f"others in its batch"
            )


def rope_types(text: Any) -> list[str]:
    """Return the kinds of rotary embedding a config asks for, one for each kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(parameters, dict):
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    found = []
    for part in nested or [parameters]:
        rope_type = part.get("rope_type", part.get("type"))
        if rope_type is not None:
            found.append(str(rope_type))
    return found


def _uses_attention_interface(built: Any) -> bool:
    """Whether the class says that it does; wrappers say it of the text model inside them."""
    return bool(getattr(built, "_supports_attention_backend", False))
