"""What a backend needs to know of one layer: where its codes lie and what they mean."""

from dataclasses import dataclass

import torch

from kv8.formats.base import KVFormat
from kv8.geometry import LayerGeometry


@dataclass(frozen=True)
class LayerCounters:
    """Running counts of one layer's store, on the cache's device; int64 [4] each.

    Entries, those of `kv8.formats.encode.COUNTED`: values stored, saturated (magnitude beyond the
    format's finite range), underflowed to zero (non-zero before), not a number.
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class LayerAttention:
    """One layer's cache, scales and settings, fixed after load.

    Attributes:
        geometry: the layer itself. K/V tensors are those of ``geometry.kv_source``.
        group: index of the layer's cache group (which block table it uses).
        format: format of the stored codes.
        k_codes: [N, K, B, D] in the format's torch dtype; dimension 0 may be strided, the rest
            is contiguous.
        v_codes: likewise.
        k_scale: float32 [K], or `None` when the format is not quantized.
        v_scale: float32 [K], or `None` likewise.
        q_scale: float32 [H] when queries are quantized (FP8 attention), else `None`.
        counters: where `store` counts. `None` where storing loses nothing: in the model's dtype
            and in float32. Another 16-bit type than the model's saturates and underflows too.

    Scale tensors keep their address for the life of the engine and are updated in place.
    """

    geometry: LayerGeometry
    group: int
    format: KVFormat
    k_codes: torch.Tensor
    v_codes: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    q_scale: torch.Tensor | None
    counters: LayerCounters | None
