"""The cpu backend: checks, then the native kernels of csrc/cpu. `auto` takes it where it loads."""

import ctypes
from collections.abc import Sequence

import torch

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.checks import (
    check_batch,
    check_cached_heads,
    check_layer,
    check_new_tensors,
    check_query,
)
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
    capturable = False

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

    def prepare(
        self, native: "NativeAttention", layer: LayerAttention, batch: AttentionBatch
    ) -> None:
        """Let ``native`` work on a batch: what `store` and `attend` do is done when it is run."""
        group = self._step_view(batch, layer)
        if native.layer is not layer:
            native.use(layer, self._layer_view(layer))
        store, attend = native.store, native.attend
        store.slots, store.num_tokens = group.slots, group.num_tokens
        attend.query_starts, attend.context_lens = group.query_starts, group.context_lens
        attend.block_table, attend.table_width = group.block_table, group.table_width
        attend.num_sequences, attend.num_tokens = group.num_sequences, group.num_tokens
        self._offer_scratch(attend)

    def give_scratch(self, natives: Sequence["NativeAttention"], needed: int) -> None:
        """Let all of ``natives`` have ``needed`` bytes of scratch; they share it."""
        self._scratch = torch.empty(needed, dtype=torch.uint8)
        for native in natives:
            self._offer_scratch(native.attend)

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


class NativeAttention:
    """A layer's store and attention as operations of a list (`kv8.kernels.step`).

    They are described once, for tensors that stay where they are and of which a step uses the
    first T rows; `CpuBackend.prepare` fills in the batch.

    Args:
        query: [T, H, D] like ``output``; ``key`` and ``value`` are [T, K, D].
        call: what the layer's attention asks for; without sinks.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        call: AttentionCall,
    ) -> None:
        assert call.sinks is None
        assert output.is_contiguous()
        self.layer: LayerAttention | None = None
        self._tensors, self._call = (query, key, value, output), call
        self.store, self.attend = StoreStruct(), AttendStruct()
        describe_rows(self.store.key, key)
        describe_rows(self.store.value, value)
        describe_rows(self.attend.query, query)
        describe_rows(self.attend.output, output)
        self.attend.softmax_scale, self.attend.softcap = call.softmax_scale, call.softcap or 0.0
        self.attend.num_heads, self.attend.window = query.shape[1], call.window or 0

    def use(self, layer: LayerAttention, view: "_LayerView") -> None:
        """Store to, and read, this layer's cache from now on."""
        query, key, value, _ = self._tensors
        check_cached_heads(layer, query, key, value, self._call)
        self.store.cache = self.attend.cache = view.cache
        self.store.k_counts, self.store.v_counts = view.k_counts, view.v_counts
        self.attend.q_scale = view.q_scale
        self.layer = layer


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
        self.query_starts, self.context_lens, self.block_table, self.slots = (
            tensor.data_ptr() for tensor in self._kept
        )
        self.table_width = self._kept[2].shape[1]
        self.num_sequences, self.num_tokens = batch.num_sequences, batch.num_tokens
        self.attend = AttendStruct(
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_table=self.block_table,
            table_width=self.table_width,
            num_sequences=self.num_sequences,
            num_tokens=self.num_tokens,
        )
        self.store = StoreStruct(slots=self.slots, num_tokens=self.num_tokens)


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
