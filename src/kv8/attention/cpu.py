"""The cpu backend: checks, then the native kernels of csrc/cpu. `auto` takes it where it loads."""

import ctypes

import torch

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.checks import check_attend, check_layer, check_store
from kv8.attention.layer import LayerAttention
from kv8.kernels.cpu import (
    FORMAT_NUMBERS,
    MAX_HEAD_DIM,
    AttendStruct,
    CacheStruct,
    CpuKernels,
    StoreStruct,
    load_kernels,
    rows_struct,
)


class CpuBackend:
    """Attention by native kernels; see csrc/cpu/kernels.h for what they do.

    One backend serves one engine: it keeps scratch memory between calls, grown as needed.
    """

    name = "cpu"

    def __init__(self, kernels: CpuKernels | None = None) -> None:
        self._kernels = load_kernels() if kernels is None else kernels
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def refuses(self, layer: LayerAttention) -> str | None:
        """Return why this backend cannot serve ``layer``, or `None` if it can."""
        check_layer(layer)
        device, head_dim = layer.k_codes.device, layer.geometry.head_dim
        if device.type != "cpu":
            return f"its cache is on {device}"
        if head_dim % 4 or head_dim > MAX_HEAD_DIM:
            return f"head size {head_dim} is no multiple of 4 up to {MAX_HEAD_DIM}"
        if layer.q_scale is not None and not layer.format.quantized:
            return f"FP8 attention needs an FP8 cache, this layer's is {layer.format.name}"
        return None

    def store(
        self, layer: LayerAttention, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> None:
        """Quantize ``key`` and ``value`` ([T, K, D]), count, and scatter them to the slots."""
        check_store(layer, key, value, batch)
        key, value = _with_whole_rows(key), _with_whole_rows(value)
        slots = _plain(batch.slots[layer.group], torch.int64)
        counters = layer.counters
        self._kernels.store(
            StoreStruct(
                ctypes.pointer(_cache_struct(layer)),
                rows_struct(key),
                rows_struct(value),
                slots.data_ptr(),
                batch.num_tokens,
                _address(None if counters is None else counters.k),
                _address(None if counters is None else counters.v),
            )
        )

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
    ) -> torch.Tensor:
        """Return attention of ``query`` ([T, H, D]) over the stored codes; same shape and dtype."""
        check_attend(layer, query, batch, call)
        query = _with_whole_rows(query)
        output = torch.empty(query.shape, dtype=query.dtype)
        query_starts = _plain(batch.query_starts, torch.int32)
        context_lens = _plain(batch.context_lens, torch.int32)
        block_table = _plain(batch.block_tables[layer.group], torch.int32)
        sinks = None if call.sinks is None else call.sinks.contiguous()
        arguments = AttendStruct(
            ctypes.pointer(_cache_struct(layer)),
            rows_struct(query),
            rows_struct(output),
            query_starts.data_ptr(),
            context_lens.data_ptr(),
            block_table.data_ptr(),
            block_table.shape[1],
            batch.num_sequences,
            batch.num_tokens,
            _address(layer.q_scale),
            _address(sinks),
            call.softmax_scale,
            call.softcap or 0.0,
            layer.geometry.num_heads,
            call.window or 0,
            self._scratch.data_ptr(),
            self._scratch.numel(),
        )
        missing = self._kernels.attend(arguments)
        if missing > 0:
            self._scratch = torch.empty(missing, dtype=torch.uint8)
            arguments.scratch, arguments.scratch_bytes = self._scratch.data_ptr(), missing
            missing = self._kernels.attend(arguments)
        assert missing == 0
        return output


def _cache_struct(layer: LayerAttention) -> CacheStruct:
    k_codes, v_codes, size = layer.k_codes, layer.v_codes, layer.format.bytes_per_value
    num_blocks, num_kv_heads, block_size, head_dim = k_codes.shape
    return CacheStruct(
        k_codes.data_ptr(),
        v_codes.data_ptr(),
        k_codes.stride(0) * size,
        v_codes.stride(0) * size,
        _address(layer.k_scale),
        _address(layer.v_scale),
        num_blocks,
        block_size,
        num_kv_heads,
        head_dim,
        FORMAT_NUMBERS[k_codes.dtype],
    )


def _with_whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` itself if its last dimension is contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    assert tensor.dtype == dtype, f"{tensor.dtype}, not {dtype}"
    return tensor.contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
