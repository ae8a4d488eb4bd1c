"""The attention function transformers' models call: it hands Q, K and V to an attention backend.

One function is registered for the whole process and holds no state: it finds the model's bound
batch and the layer's number through an attribute of the attention module that called it. So two
models never mix, and a model that was not hooked cannot be served by accident.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kv8.attention.backend import AttentionBackend, AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerAttention
from kv8.errors import EngineError, UnsupportedModelError
from kv8.geometry import LayerGeometry

INTERFACE_NAME: Final = "kv8"
BINDING: Final = "kv8_binding"  # attribute of an attention module: its LayerBinding

# Keywords that change nothing about attention over a cache. `None` and `False` never do.
_HARMLESS = frozenset(("position_ids", "cache_position", "use_cache", "return_dict"))


@dataclass
class BoundStep:
    """What one forward pass works on, and which layers have attended so far."""

    batch: AttentionBatch
    layers: Mapping[int, LayerAttention]
    backend: AttentionBackend
    attended: set[int] = field(default_factory=set)


@dataclass
class Scope:
    """The one place a model's attention modules look for the batch they work on.

    Attributes:
        architecture: the model's name, for messages.
        step: the bound batch.
        recorded: layer numbers and calls that a recording attention function noted.
    """

    architecture: str
    step: BoundStep | None = None
    recorded: list[tuple[int, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class LayerBinding:
    """What an attention module is to kv8."""

    geometry: LayerGeometry
    scope: Scope

    def refuse(self, reason: str) -> UnsupportedModelError:
        """Return the error for something this layer asks that kv8 cannot do."""
        return UnsupportedModelError(
            f"kv8 cannot serve {self.scope.architecture} correctly: layer {self.geometry.layer} "
            f"{reason}."
        )


def attend_through_cache(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Store K and V, attend over the cache, and return the output [1, T, H, D].

    Args:
        module: the attention module of one layer.
        query: [1, H, T, D], after the rotary embedding.
        key: [1, K, T, D], likewise.
        value: [1, K, T, D].
        attention_mask: must be `None`: which token sees which follows from the batch.
        keywords: everything else the model passes; what is not known is refused by name.

    Raises:
        UnsupportedModelError: the call asks for something kv8 would get wrong.
        EngineError: no batch is bound.
    """
    binding: LayerBinding | None = getattr(module, BINDING, None)
    if binding is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends through kv8 but belongs to no layer of the decoder. "
            f"The model has attention that kv8 does not know of."
        )
    if attention_mask is not None:
        raise binding.refuse("brings an attention mask of its own")
    call = read_call(binding, module, query, keywords)
    check_shapes(binding, query, key, value)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return store_and_attend(binding, q, k, v, call).unsqueeze(0), None


def store_and_attend(
    binding: LayerBinding,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """Store K and V ([T, K, D]) of the bound batch; return attention of Q ([T, H, D]) over all.

    Raises:
        UnsupportedModelError: the layer has attended in this step already.
        EngineError: no batch is bound.
    """
    step, geometry = open_step(binding), binding.geometry
    layer = step.layers[geometry.layer]
    if geometry.owns_kv:
        step.backend.store(layer, key, value, step.batch)
    output = step.backend.attend(layer, query, step.batch, call)
    step.attended.add(geometry.layer)
    return output


def open_step(binding: LayerBinding) -> BoundStep:
    """Return the bound step, in which the layer has still to attend.

    Raises:
        UnsupportedModelError: the layer has attended in this step already.
        EngineError: no batch is bound.
    """
    step = binding.scope.step
    if step is None:
        raise EngineError("The model was called outside of `with model.bound(...)`.")
    if binding.geometry.layer in step.attended:
        raise binding.refuse("attends more than once for a token, and kv8 stores K and V once")
    return step


def read_call(
    binding: LayerBinding, module: torch.nn.Module, query: torch.Tensor, keywords: dict[str, Any]
) -> AttentionCall:
    """Return what the keywords ask for; every one of them is looked at.

    Raises:
        UnsupportedModelError: one is unknown, or asks for what kv8 does not do.
    """
    asked = {k: v for k, v in keywords.items() if v is not None and v is not False}
    window = asked.pop("sliding_window", None)
    softcap = asked.pop("softcap", None)
    sinks = asked.pop("s_aux", None)
    scaling = asked.pop("scaling", None)
    if asked.pop("dropout", 0.0) != 0.0:
        raise binding.refuse("asks for dropout, which has no place in inference")
    causal = keywords.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    asked.pop("is_causal", None)
    if not causal:
        raise binding.refuse("lets tokens see later tokens (is_causal is false)")
    unknown = sorted(asked.keys() - _HARMLESS)
    if unknown:
        raise binding.refuse(f"asks for something kv8 does not know: {', '.join(unknown)}")
    if window != binding.geometry.window:
        raise binding.refuse(
            f"attends within a window of {window} tokens, but its config says "
            f"{binding.geometry.window}"
        )
    return AttentionCall(
        softmax_scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        softcap=float(softcap) if softcap is not None else None,
        sinks=sinks.reshape(-1).float() if sinks is not None else None,
        window=window,
    )


def check_shapes(
    binding: LayerBinding, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Raise `UnsupportedModelError` unless Q, K and V are what the geometry says."""
    geometry = binding.geometry
    num_tokens = query.shape[2]
    stored = (1, geometry.num_kv_heads, num_tokens, geometry.head_dim)
    for name, tensor, expected in (
        ("queries", query, (1, geometry.num_heads, num_tokens, geometry.head_dim)),
        ("keys", key, stored),
        ("values", value, stored),
    ):
        if tensor.shape != expected:
            raise binding.refuse(
                f"has {name} of shape {tuple(tensor.shape)}, but its config says {expected} "
                f"(1, heads, tokens, head size)"
            )


ALL_ATTENTION_FUNCTIONS.register(INTERFACE_NAME, attend_through_cache)
