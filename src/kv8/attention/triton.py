"""The triton backend: checks, then GPU kernels in Triton. `auto` takes it for caches on a GPU."""

from collections.abc import Sequence

import torch

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.checks import check_batch, check_layer, check_new_tensors, check_query
from kv8.attention.layer import LayerAttention
from kv8.kernels import triton_launch as launch
from kv8.kernels.triton_cache import Sequences, Settings, TritonCache
from kv8.kernels.triton_config import (
    INTERPRETER,
    MAX_GROUP,
    MAX_HEAD_DIM,
    Device,
    describe_device,
    is_interpreted,
)


class TritonBackend:
    """Attention by Triton kernels; see `kv8.kernels.triton_launch` for what they do.

    One backend serves one engine on one stream: it keeps a workspace between calls, and the
    kernels' view of each layer and of the current batch.

    A step can be captured in a CUDA graph. Kernels read lengths, tables, slots, scales and counters
    on the device. Of the host's numbers they depend on S, T, a table's width, and on whether all,
    some or none of the sequences have one new token; on `context_lens_host` never. A row of padding
    has slot -1 and context length 0: nothing is stored for it, and its output is zero.

    Raises:
        ImportError: there is no GPU here (or Triton's interpreter in its place).
    """

    name = "triton"
    capturable = True

    def __init__(self) -> None:
        if not is_interpreted() and not torch.cuda.is_available():
            raise ImportError("PyTorch finds no GPU here")
        self._layers: dict[int, tuple[LayerAttention, TritonCache]] = {}
        self._step: tuple[AttentionBatch, dict[int, Sequences]] | None = None
        self._workspace: torch.Tensor | None = None
        self._outgrown: list[torch.Tensor] = []  # captured graphs may still write there

    def refuses(self, layer: LayerAttention) -> str | None:
        """Return why this backend cannot serve ``layer``, or `None` if it can."""
        check_layer(layer)
        geometry, device = layer.geometry, layer.k_codes.device
        if device.type != "cuda" and not is_interpreted():
            return f"its cache is on {device}"
        if geometry.head_dim > MAX_HEAD_DIM:
            return f"head size {geometry.head_dim} is more than {MAX_HEAD_DIM}"
        if geometry.num_heads // geometry.num_kv_heads > MAX_GROUP:
            group = geometry.num_heads // geometry.num_kv_heads
            return f"{group} query heads share a KV head, more than {MAX_GROUP}"
        if layer.q_scale is not None and not layer.format.quantized:
            return f"FP8 attention needs an FP8 cache, this layer's is {layer.format.name}"
        return None

    def reserve(
        self, layers: Sequence[LayerAttention], max_sequences: int, max_context: int
    ) -> int:
        """Make the workspace large enough for any decode batch; return its size in bytes.

        Args:
            layers: the layers that will be served.
            max_sequences: the most sequences of a batch.
            max_context: the most tokens that a block table has room for.
        """
        needed = max(
            launch.workspace_values(self._cache(layer), torch.bfloat16, count, max_context)
            for layer in layers
            for count in range(1, max_sequences + 1)
        )
        return self._workspace_of(needed, layers[0].k_codes.device).nbytes

    def store(
        self, layer: LayerAttention, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> None:
        """Quantize ``key`` and ``value`` ([T, K, D]), count, and scatter them to the slots."""
        self._sequences(batch, layer)
        check_new_tensors(layer, key, value, batch)
        slots = batch.slots[layer.group]
        launch.run_store(self._cache(layer), _with_whole_rows(key), _with_whole_rows(value), slots)

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
    ) -> torch.Tensor:
        """Return attention of ``query`` ([T, H, D]) over the stored codes; same shape and dtype."""
        sequences = self._sequences(batch, layer)
        check_query(layer, query, batch, call)
        assert call.softmax_scale > 0, f"softmax scale {call.softmax_scale}"
        query = _with_whole_rows(query)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        cache = self._cache(layer)
        settings = Settings(
            softmax_scale=call.softmax_scale,
            softcap=call.softcap or 0.0,
            sinks=None if call.sinks is None else call.sinks.contiguous(),
            window=call.window or 0,
        )
        num_single = batch.query_lens_host.count(1)
        if num_single > 0:
            needed = launch.workspace_values(
                cache, query.dtype, sequences.num_sequences, sequences.max_context
            )
            workspace = self._workspace_of(needed, query.device)
            launch.run_decode(cache, query, output, sequences, settings, workspace)
        if num_single < batch.num_sequences:
            launch.run_prefill(
                cache, query, output, sequences, settings, skip_single=num_single > 0
            )  # fmt: skip
        return output

    def _cache(self, layer: LayerAttention) -> TritonCache:
        known = self._layers.get(id(layer))
        if known is None or known[0] is not layer:
            counters = layer.counters
            cache = TritonCache(
                device=_device_of(layer.k_codes),
                format=layer.format.name,
                largest=layer.format.finite_max,
                smallest=layer.format.smallest,
                k_codes=layer.k_codes,
                v_codes=layer.v_codes,
                k_scale=layer.k_scale,
                v_scale=layer.v_scale,
                q_scale=layer.q_scale,
                k_counts=None if counters is None else counters.k,
                v_counts=None if counters is None else counters.v,
                num_heads=layer.geometry.num_heads,
            )
            # Keeps the layer, so that the number `id` gave is not used again.
            known = self._layers[id(layer)] = (layer, cache)
        return known[1]

    def _sequences(self, batch: AttentionBatch, layer: LayerAttention) -> Sequences:
        """Return the batch as a layer's group sees it; checked against the group's first layer."""
        if self._step is None or self._step[0] is not batch:
            self._step = (batch, {})
        groups = self._step[1]
        if layer.group not in groups:
            check_batch(layer, batch)
            table = batch.block_tables[layer.group]
            assert table.stride(1) == 1, f"block table has strides {table.stride()}"
            groups[layer.group] = Sequences(
                query_starts=batch.query_starts,
                context_lens=batch.context_lens,
                block_table=table,
                num_sequences=batch.num_sequences,
                num_tokens=batch.num_tokens,
                max_context=table.shape[1] * batch.block_size,
            )
        return groups[layer.group]

    def _workspace_of(self, needed: int, device: torch.device) -> torch.Tensor:
        """Return at least ``needed`` float32 values. Their address changes only if they grow."""
        old = self._workspace
        if old is not None and len(old) >= needed:
            return old
        if device.type == "cuda":
            capturing = torch.cuda.is_current_stream_capturing()
            assert not capturing, "the workspace must not grow in a captured graph: `reserve` first"
        if old is not None:
            self._outgrown.append(old)
            needed = max(needed, 2 * len(old))
        self._workspace = torch.empty(needed, dtype=torch.float32, device=device)
        return self._workspace


def _device_of(codes: torch.Tensor) -> Device:
    if is_interpreted():
        return INTERPRETER
    return describe_device(codes.device.index)


def _with_whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` itself if its last dimension is contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
