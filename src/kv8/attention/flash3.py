"""FlashAttention 3 over kv8's cache, where `flash_attn_interface` is installed.

`auto` uses it where it is measured to be faster (`kv8.attention.measured`); by name it attends
wherever it can. It multiplies operands of one type. So it serves 16-bit caches of the model's type,
and e4m3 caches with FP8 attention; scales go to it per KV head. The triton kernels store, and
also attend where it cannot: with attention sinks, and over 16-bit caches of another type.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.checks import check_attend
from kv8.attention.layer import LayerAttention
from kv8.attention.triton import TritonBackend
from kv8.formats.base import FP8_E4M3
from kv8.formats.encode import encode

_MAX_HEAD_DIM = 256


class Flash3Backend:
    """Attention by FlashAttention 3's kernels, all else by `TritonBackend`; see the module.

    Its weights are rounded relative to the running maximum itself, which is no whole number: in FP8
    attention they differ from the reference's by up to one step of e4m3.

    Args:
        attend: `flash_attn_interface.flash_attn_with_kvcache`, or a stand-in.
        triton: does all else.

    Raises:
        ImportError: it, Triton or a GPU is missing; says which.
    """

    name = "flash3"
    capturable = False

    def __init__(
        self, attend: Callable[..., Any] | None = None, triton: TritonBackend | None = None
    ) -> None:
        self._attend = load_flash3() if attend is None else attend
        self._triton = TritonBackend() if triton is None else triton

    def refuses(self, layer: LayerAttention) -> str | None:
        """Return why this backend cannot serve ``layer``, or `None` if it can."""
        geometry, kv_format = layer.geometry, layer.format
        reason = self._triton.refuses(layer)
        if reason is not None:
            return reason
        if geometry.head_dim > _MAX_HEAD_DIM or geometry.head_dim % 8:
            return f"head size {geometry.head_dim} is no multiple of 8 up to {_MAX_HEAD_DIM}"
        if kv_format.name not in ("fp8_e4m3", "bfloat16", "float16"):
            return f"FlashAttention 3 reads no {kv_format.name} cache"
        if layer.q_scale is None:
            return (
                "FlashAttention 3 reads an FP8 cache in FP8 attention only, and that needs q scales"
                if kv_format.quantized
                else None
            )
        grouped = layer.q_scale.view(geometry.num_kv_heads, -1)
        if not torch.equal(grouped, grouped[:, :1].expand_as(grouped)):
            return "FlashAttention 3 takes one q scale for all query heads of a KV head"
        return None

    def leaves(self, layer: LayerAttention, dtype: torch.dtype, call: AttentionCall) -> str | None:
        """Return why queries of ``dtype`` over ``layer`` are left to the triton kernels."""
        if call.sinks is not None:
            return "FlashAttention 3 knows no attention sinks over a cache"
        if layer.q_scale is None and dtype != layer.k_codes.dtype:
            return f"FlashAttention 3 multiplies no {dtype} queries with {layer.format.name}"
        return None

    def store(
        self, layer: LayerAttention, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> None:
        """Quantize ``key`` and ``value`` ([T, K, D]), count, and scatter them to the slots."""
        self._triton.store(layer, key, value, batch)

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
    ) -> torch.Tensor:
        """Return attention of ``query`` ([T, H, D]) over the stored codes; same shape and dtype."""
        if self.leaves(layer, query.dtype, call) is not None:
            return self._triton.attend(layer, query, batch, call)
        check_attend(layer, query, batch, call)
        output = self._attend(**flash3_arguments(layer, query, batch, call))
        assert isinstance(output, torch.Tensor)
        return output.to(query.dtype)


def flash3_arguments(
    layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
) -> dict[str, Any]:
    """Return what `flash_attn_with_kvcache` is called with; in FP8 attention the query as codes."""
    operand, q_descale = query, None
    if layer.q_scale is not None:
        operand = encode(query, layer.q_scale.unsqueeze(1), FP8_E4M3)
        q_descale = layer.q_scale.view(layer.geometry.num_kv_heads, -1)[:, 0]
    return {
        "q": operand,
        "k_cache": layer.k_codes.transpose(1, 2),  # [N, B, K, D]
        "v_cache": layer.v_codes.transpose(1, 2),
        "cache_seqlens": batch.context_lens,
        "page_table": batch.block_tables[layer.group],
        "cu_seqlens_q": batch.query_starts,
        "max_seqlen_q": max(batch.query_lens_host),
        "q_descale": _for_each_sequence(q_descale, batch),
        "k_descale": _for_each_sequence(layer.k_scale, batch),
        "v_descale": _for_each_sequence(layer.v_scale, batch),
        "softmax_scale": call.softmax_scale,
        "causal": True,
        "window_size": (-1, -1) if call.window is None else (call.window - 1, 0),
        "softcap": call.softcap or 0.0,
    }


def _for_each_sequence(scale: torch.Tensor | None, batch: AttentionBatch) -> torch.Tensor | None:
    """Return float32 [S, K] that all say ``scale`` [K]: one tensor seen S times."""
    return None if scale is None else scale.unsqueeze(0).expand(batch.num_sequences, -1)


def load_flash3() -> Callable[..., Any]:
    """Return `flash_attn_with_kvcache`.

    Raises:
        ImportError: it is not installed.
    """
    try:
        module = importlib.import_module("flash_attn_interface")
    except ImportError as error:
        raise ImportError(f"FlashAttention 3 is not installed ({error})") from error
    function: Callable[..., Any] = module.flash_attn_with_kvcache
    return function
