"""Reads from a config what the KV cache depends on; `kv8.models.verify` checks it on the model."""

from typing import Any

from kv8.errors import ModelError
from kv8.geometry import LayerGeometry, ModelGeometry
from kv8.models.config import layer_config, model_class, text_config
from kv8.models.refusals import FULL, SLIDING, refuse_unservable


def read_geometry(config: Any) -> ModelGeometry:
    """Return the geometry of the model that ``config`` (from `load_config`) describes.

    Raises:
        UnsupportedModelError: the model has a part kv8 cannot serve correctly.
        ModelError: a field is missing or impossible; the message names it.
    """
    refuse_unservable(config)
    text = text_config(config)
    num_layers = _positive(text, "num_hidden_layers")
    types = _layer_types(text, num_layers)
    sources = _kv_sources(text, types)
    return ModelGeometry(
        architecture=model_class(config).__name__,  # type: ignore[union-attr]
        model_dtype=str(config.dtype).removeprefix("torch."),
        max_position=_positive(text, "max_position_embeddings"),
        vocab_size=_positive(text, "vocab_size"),
        layers=tuple(_layer(text, i, types[i], sources[i]) for i in range(num_layers)),
    )


def _layer(text: Any, number: int, layer_type: str, kv_source: int) -> LayerGeometry:
    fields = layer_config(text, number)
    num_heads = _positive(fields, "num_attention_heads")
    heads_by_layer = getattr(text, "num_attention_heads_per_layer", None)
    if heads_by_layer:
        num_heads = heads_by_layer[number]
    num_kv_heads = _optional(fields, "num_key_value_heads") or num_heads
    head_dim = _optional(fields, "head_dim") or _positive(fields, "hidden_size") // num_heads
    if num_heads % num_kv_heads:
        raise ModelError(
            f"Layer {number} has {num_heads} query heads (num_attention_heads), not a multiple of "
            f"its {num_kv_heads} KV heads (num_key_value_heads). The config is wrong."
        )
    return LayerGeometry(
        layer=number,
        type=layer_type,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=_positive(fields, "sliding_window") if layer_type == SLIDING else None,
        kv_source=kv_source,
    )


def _layer_types(text: Any, num_layers: int) -> list[str]:
    """Return the type of each layer; a config without the list has the same type everywhere."""
    types = getattr(text, "layer_types", None)
    if types:
        if len(types) < num_layers:
            raise ModelError(
                f"layer_types lists {len(types)} layers, but num_hidden_layers is {num_layers}."
            )
        return list(types[:num_layers])
    window = getattr(text, "sliding_window", None)
    windowed = bool(window) and getattr(text, "use_sliding_window", True)
    return [SLIDING if windowed else FULL] * num_layers


def _kv_sources(text: Any, types: list[str]) -> list[int]:
    """Return for each layer the one whose keys and values it reads.

    The last ``num_kv_shared_layers`` layers of Gemma 3n and Gemma 4 have none of their own: each
    reads those of the last layer before them that has its type.
    """
    num_shared = getattr(text, "num_kv_shared_layers", None) or 0
    first_shared = len(types) - num_shared
    own = types[:first_shared]
    sources = list(range(len(own)))
    for number, layer_type in enumerate(types[first_shared:], start=first_shared):
        if layer_type not in own:
            raise ModelError(
                f"Layer {number} ({layer_type}) should share the keys and values of an earlier "
                f"layer of its type, but num_kv_shared_layers={num_shared} leaves none."
            )
        sources.append(len(own) - 1 - own[::-1].index(layer_type))
    return sources


def _positive(config: Any, field: str) -> int:
    value = getattr(config, field, None)
    if value is None:
        raise ModelError(
            f"The config of {config.model_type} has no field {field!r}, which kv8 needs. Add it "
            f"to config.json, or download the model again."
        )
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"Field {field!r} must be a whole number of at least 1, got {value!r}.")
    return value


def _optional(config: Any, field: str) -> int | None:
    return None if getattr(config, field, None) is None else _positive(config, field)
