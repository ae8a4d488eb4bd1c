"""Decode steps from graphs without a GPU: a recorder of torch operations, and a backend to record.

`OperationCapture` does on a CPU what a CUDA graph does: it notes every operation with the tensors
it read and wrote, and plays them back in that order on those very tensors. Whatever Python decided
meanwhile is fixed, so a step that depends on the host's view of lengths comes out wrong.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerAttention
from kv8.attention.reference import ReferenceBackend
from kv8.formats.base import FP8_E4M3
from kv8.formats.encode import bits, decode, encode, encode_counting


class OperationCapture(TorchDispatchMode):
    """A `kv8.engine.decode_graphs.Capture` that works on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.num_recorded: list[int] = []
        self._tape: list[tuple[Any, Any, Any, Any]] = []

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()  # as a real capture does, to warm up
        self._tape = tape = []
        with self:
            compute()
        self.num_recorded.append(len(tape))

        @torch.inference_mode()
        def replay() -> None:
            for operation, args, kwargs, recorded in tape:
                _write(operation(*args, **kwargs), recorded)

        return replay

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self._tape.append((operation, args, kwargs or {}, result))
        return result


def _write(result: Any, recorded: Any) -> None:
    if torch.is_tensor(result):
        if result.data_ptr() != recorded.data_ptr():
            bits(recorded).copy_(bits(result)) if result.dtype.itemsize < 8 else recorded.copy_(
                result
            )
    elif isinstance(result, tuple | list):
        for one, other in zip(result, recorded, strict=True):
            _write(one, other)


class DeviceLengthsBackend(ReferenceBackend):
    """The reference, and for recorded steps plain torch that asks the host for no length."""

    name = "device lengths"
    capturable = True

    def __init__(self) -> None:
        self.addresses: set[tuple[int, ...]] = set()
        self.recorded_steps = 0

    def store(
        self, layer: LayerAttention, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> None:
        if not batch.lengths_on_device:
            return super().store(layer, key, value, batch)
        slots, size = batch.slots[layer.group], batch.block_size
        for values, scale, pool, counter in (
            (key, layer.k_scale, layer.k_codes, layer.counters and layer.counters.k),
            (value, layer.v_scale, layer.v_codes, layer.counters and layer.counters.v),
        ):
            for row in range(len(slots)):  # one after another: padding writes what is there
                stored, slot = slots[row] >= 0, slots[row].clamp_min(0)
                per_head = None if scale is None else scale.unsqueeze(1)
                codes, counts = encode_counting(values[row], per_head, layer.format)
                place = (slot // size, slice(None), slot % size)
                place = (place[0].view(1), place[1], place[2].view(1))
                old = bits(pool)[place]
                bits(pool)[place] = torch.where(stored, bits(codes).unsqueeze(0), old)
                if counter is not None:
                    counter += counts * stored
        return None

    def attend(
        self, layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
    ) -> torch.Tensor:
        if not batch.lengths_on_device:
            return super().attend(layer, query, batch, call)
        table, lengths = batch.block_tables[layer.group].long(), batch.context_lens.long()
        tensors = (table, lengths, batch.slots[layer.group], batch.query_starts)
        self.addresses.add(tuple(t.data_ptr() for t in (*tensors[2:], batch.context_lens)))
        self.recorded_steps += 1
        num_seqs, num_heads, head_dim = query.shape
        positions = torch.arange(table.shape[1] * batch.block_size)
        hidden = positions >= lengths[:, None]
        if call.window is not None:
            hidden = hidden | (positions < lengths[:, None] - call.window)
        sides = []
        for pool in (layer.k_codes, layer.v_codes):
            codes = bits(pool)[table].transpose(2, 3).flatten(1, 2)  # [S, n, K, D]
            codes = codes.masked_fill(hidden[:, :, None, None], 0).view(pool.dtype)
            sides.append(decode(codes, None, layer.format))
        keys, values = sides
        per_kv = num_heads // keys.shape[2]
        if layer.q_scale is not None:
            scale = layer.q_scale[:, None]
            query = decode(encode(query, scale, FP8_E4M3), scale, FP8_E4M3).to(query.dtype)
        scale = call.softmax_scale if layer.k_scale is None else call.softmax_scale * layer.k_scale
        grouped = query.float().view(num_seqs, -1, per_kv, head_dim)
        if layer.k_scale is not None:
            scale = scale[:, None, None]
        logits = torch.einsum("skgd,snkd->skgn", grouped * scale, keys)
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        logits = logits.masked_fill(hidden[:, None, None, :], -torch.inf)
        if call.sinks is not None:
            sinks = call.sinks.view(1, -1, per_kv, 1).expand(num_seqs, -1, -1, 1)
            logits = torch.cat([logits, sinks], dim=-1)
        weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)[..., : len(positions)]
        output = torch.einsum("skgn,snkd->skgd", weights, values)
        if layer.v_scale is not None:
            output = output * layer.v_scale[:, None, None]
        return output.reshape(num_seqs, num_heads, head_dim).to(query.dtype)
