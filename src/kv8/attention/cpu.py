"""The cpu backend: checks, then the native kernels of csrc/cpu. `auto` takes it where it loads."""

import ctypes

import torch

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.checks import check_batch, check_layer, check_new_tensors, check_query
from kv8.attention.layer import LayerAttention
from kv8.kernels.cpu import (
    FORMAT_NUMBERS,
    MAX_HEAD_DIM,
    AttendStruct,
    CacheStruct,
    CpuKernels,
    StoreStruct,
    describe_rows,
    load_kernels,
)


class CpuBackend:
    """Attention by native kernels; see csrc/cpu/kernels.h for what they do.

    One backend serves one engine: it keeps scratch memory between calls, grown as needed, and the
    kernels' view of each layer and of the current batch, since a call costs as much as its Python.
    """

    name = "cpu"

    def __init__(self, kernels: CpuKernels | None = None) -> None:
        self._kernels = load_kernels() if kernels is None else kernels
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._layers: dict[int, _LayerView] = {}
        self._step: _StepView | None = None

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
        arguments = self._step_view(batch, layer).store
        check_new_tensors(layer, key, value, batch)
        key, value = _with_whole_rows(key), _with_whole_rows(value)
        view = self._layer_view(layer)
        arguments.cache = view.cache
        describe_rows(arguments.key, key)
        describe_rows(arguments.value, value)
        arguments.k_counts, arguments.v_counts = view.k_counts, view.v_counts
        self._kernels.store(arguments)

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
    ) -> torch.Tensor:
        """Return attention of ``query`` ([T, H, D]) over the stored codes; same shape and dtype."""
        arguments = self._step_view(batch, layer).attend
        check_query(layer, query, batch, call)
        query = _with_whole_rows(query)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        sinks = None if call.sinks is None else call.sinks.contiguous()
        view = self._layer_view(layer)
        arguments.cache, arguments.q_scale = view.cache, view.q_scale
        describe_rows(arguments.query, query)
        describe_rows(arguments.output, output)
        arguments.sinks = _address(sinks)
        arguments.softmax_scale, arguments.softcap = call.softmax_scale, call.softcap or 0.0
        arguments.num_heads, arguments.window = layer.geometry.num_heads, call.window or 0
        self._offer_scratch(arguments)
        needed = self._kernels.attend(arguments)
        if needed > 0:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
            self._offer_scratch(arguments)
            needed = self._kernels.attend(arguments)
        assert needed == 0
        return output

    def _offer_scratch(self, arguments: AttendStruct) -> None:
        arguments.scratch, arguments.scratch_bytes = self._scratch.data_ptr(), len(self._scratch)

    def _layer_view(self, layer: LayerAttention) -> "_LayerView":
        view = self._layers.get(id(layer))
        if view is None or view.layer is not layer:
            view = self._layers[id(layer)] = _LayerView(layer)
        return view

    def _step_view(self, batch: AttentionBatch, layer: LayerAttention) -> "_GroupView":
        if self._step is None or self._step.batch is not batch:
            self._step = _StepView(batch)
        return self._step.group(layer)


class _LayerView:
    """Where a layer's memory lies. The addresses hold for the engine's life (`LayerAttention`)."""

    def __init__(self, layer: LayerAttention) -> None:
        self.layer = layer  # keeps the memory, and the number `id` gave, from being used again
        k_codes, v_codes, size = layer.k_codes, layer.v_codes, layer.format.bytes_per_value
        num_blocks, num_kv_heads, block_size, head_dim = k_codes.shape
        self.cache = ctypes.pointer(
            CacheStruct(
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
        )
        self.q_scale = _address(layer.q_scale)
        counters = layer.counters
        self.k_counts = None if counters is None else _address(counters.k)
        self.v_counts = None if counters is None else _address(counters.v)


class _StepView:
    """The batch of the current step, as each cache group's layers see it."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.batch = batch
        self._groups: dict[int, _GroupView] = {}

    def group(self, layer: LayerAttention) -> "_GroupView":
        """Return the view of a layer's group; the batch is checked against its first layer."""
        view = self._groups.get(layer.group)
        if view is None:
            check_batch(layer, self.batch)
            view = self._groups[layer.group] = _GroupView(self.batch, layer.group)
        return view


class _GroupView:
    """Arguments of both kernels, filled in but for what differs between layers."""

    def __init__(self, batch: AttentionBatch, group: int) -> None:
        self._kept = (
            _indices(batch.query_starts, torch.int32),
            _indices(batch.context_lens, torch.int32),
            _indices(batch.block_tables[group], torch.int32),
            _indices(batch.slots[group], torch.int64),
        )
        query_starts, context_lens, block_table, slots = self._kept
        self.attend = AttendStruct(
            query_starts=query_starts.data_ptr(),
            context_lens=context_lens.data_ptr(),
            block_table=block_table.data_ptr(),
            table_width=block_table.shape[1],
            num_sequences=batch.num_sequences,
            num_tokens=batch.num_tokens,
        )
        self.store = StoreStruct(slots=slots.data_ptr(), num_tokens=batch.num_tokens)


def _with_whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` itself if its last dimension is contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _indices(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    assert tensor.dtype == dtype, f"{tensor.dtype}, not {dtype}"
    assert tensor.device.type == "cpu", f"on {tensor.device}"
    return tensor.contiguous()


def _address(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
