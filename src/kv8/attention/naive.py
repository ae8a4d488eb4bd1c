"""Attention over stored codes as its definition reads: one query, one head, one sum at a time.

In float64 and far too slow to serve with. `kv8.attention.reference` and every kernel are tested
against it.
"""

import math

import torch

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerAttention
from kv8.formats.base import FP8_E4M3
from kv8.formats.encode import decode, encode


def naive_attention(
    layer: LayerAttention, query: torch.Tensor, batch: AttentionBatch, call: AttentionCall
) -> torch.Tensor:
    """Return attention of ``query`` [T, H, D] over the stored codes, float64 [T, H, D]."""
    output = torch.empty(query.shape, dtype=torch.float64)
    queries_per_kv = layer.geometry.num_heads // layer.geometry.num_kv_heads
    row = 0
    for s, (new, context) in enumerate(
        zip(batch.query_lens_host, batch.context_lens_host, strict=True)
    ):
        table = batch.block_tables[layer.group][s]
        for position in range(context - new, context):
            start = 0 if call.window is None else max(0, position - call.window + 1)
            for head in range(layer.geometry.num_heads):
                kv_head = head // queries_per_kv
                k = _read(layer, layer.k_codes, table, kv_head, range(start, position + 1))
                v = _read(layer, layer.v_codes, table, kv_head, range(start, position + 1))
                if layer.k_scale is not None and layer.v_scale is not None:
                    k, v = k * layer.k_scale[kv_head].double(), v * layer.v_scale[kv_head].double()
                output[row, head] = _attend_one(layer, query[row, head], k, v, call, head)
            row += 1
    return output


def _attend_one(
    layer: LayerAttention,
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: AttentionCall,
    head: int,
) -> torch.Tensor:
    """Return float64 [D]: one head's query [D] over the values of its n visible tokens [n, D]."""
    q = query.double()
    if layer.q_scale is not None:
        scale = layer.q_scale[head]
        q = decode(encode(query, scale, FP8_E4M3), None, FP8_E4M3).double() * scale.double()
    logits = (k @ q) * call.softmax_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    logits = logits * math.log2(math.e)
    largest = logits.max().ceil()
    weights = torch.exp2(logits - largest)
    total = weights.sum()
    if call.sinks is not None:
        total = total + torch.exp2(call.sinks[head].double() * math.log2(math.e) - largest)
    if layer.q_scale is not None:
        weights = decode(encode(weights, 2.0**-8, FP8_E4M3), None, FP8_E4M3).double() * 2.0**-8
    return (weights @ v) / total


def _read(
    layer: LayerAttention,
    pool: torch.Tensor,
    table: torch.Tensor,
    kv_head: int,
    positions: range,
) -> torch.Tensor:
    """Return float64 [n, D]: the codes of one head at ``positions``, as unscaled values."""
    at = torch.tensor(positions)
    codes = pool[table[at // pool.shape[2]].long(), kv_head, at % pool.shape[2]]
    return decode(codes, None, layer.format).double()
