"""Tells from the weights which layers will saturate an FP8 cache that has no calibrated scale.

Qwen2 and Qwen2.5 have a key bias of norm 600 to 900 in their first and last layers, against some
20 elsewhere. It is added to every key, so at scale 1.0 those layers saturate on every prompt, and
the model answers noise.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kv8.geometry import LayerGeometry
from kv8.models.hook import HookedModel

_FUSED_NAMES = ("qkv", "c_attn", "w_pack")


def layers_with_huge_key_bias(model: HookedModel, finite_max: float) -> dict[int, float]:
    """Return layers whose key bias alone can reach ``finite_max`` at scale 1.0, and its norm.

    Args:
        model: the loaded model.
        finite_max: largest value the cache's format holds.
    """
    found = {}
    for number, module in model.attention_modules.items():
        geometry = model.geometry.layer(number)
        norms = [float(bias.detach().float().norm()) for bias in _key_biases(module, geometry)]
        largest = max(norms, default=0.0)
        if geometry.owns_kv and largest >= finite_max:
            found[number] = largest
    return found


def _key_biases(module: Any, geometry: LayerGeometry) -> Iterator[torch.Tensor]:
    """Yield the biases that are added to keys, whatever the projection is called."""
    key_size = geometry.num_kv_heads * geometry.head_dim
    query_size = geometry.num_heads * geometry.head_dim
    for name, part in module.named_modules():
        bias, leaf = getattr(part, "bias", None), name.rpartition(".")[2].lower()
        if not isinstance(bias, torch.Tensor) or bias.dim() != 1:
            continue
        if "query_key_value" in leaf and bias.numel() == 3 * query_size:
            yield bias.view(geometry.num_heads, 3, geometry.head_dim)[:, 1]
        elif any(fused in leaf for fused in _FUSED_NAMES):
            # Nearly all put all queries first, then all keys.
            yield bias[query_size : query_size + key_size]
        elif leaf.startswith("k") and bias.numel() == key_size and "norm" not in leaf:
            yield bias
