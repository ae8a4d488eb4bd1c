"""Launches of the Triton kernels: tensors and numbers in, nothing of layers, batches or engines.

A launch costs the host some ten microseconds and never waits for the device.
"""

from typing import Any

import torch
import triton.language as tl

from kv8.kernels.triton_cache import Sequences, Settings, TritonCache
from kv8.kernels.triton_config import (
    DecodeConfig,
    Shape,
    decode_config,
    prefill_config,
    store_rows,
)
from kv8.kernels.triton_decode import combine_kernel, decode_kernel
from kv8.kernels.triton_prefill import prefill_kernel
from kv8.kernels.triton_store import store_kernel

_TL_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def run_store(
    cache: TritonCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store ``key`` and ``value`` [T, K, D], D contiguous, to ``slots`` (int64 [T], -1: none)."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    shape, (k_codes, v_codes) = cache.shape(torch.float16), cache.codes()
    rows = store_rows(cache.device, shape)
    num_rows = num_tokens * num_kv_heads
    store_kernel[(-(-num_rows // rows), 2)](
        key, value, k_codes, v_codes, cache.k_scale, cache.v_scale, slots,
        cache.k_counts, cache.v_counts, num_rows,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        k_codes.stride(0), v_codes.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=shape.padded_dim,
        BLOCK_SIZE=k_codes.shape[2],
        ROWS=rows,
        FORMAT=cache.format,
        LARGEST=cache.largest,
        SMALLEST=cache.smallest,
        CASTS=cache.device.casts,
        num_warps=4,
    )  # fmt: skip


def split_count(cache: TritonCache, query: torch.dtype, num_sequences: int, bound: int) -> int:
    """Return into how many parts decode cuts contexts of up to ``bound`` tokens."""
    shape = cache.shape(cache.compute_dtype(query))
    return decode_config(cache.device, shape, num_sequences, bound).splits


def workspace_values(cache: TritonCache, query: torch.dtype, num_sequences: int, bound: int) -> int:
    """Return how many float32 values `run_decode` needs for its partial results."""
    splits = split_count(cache, query, num_sequences, bound)
    if splits == 1:
        return 0
    rows = num_sequences * cache.num_heads * splits
    return _aligned(rows) * (cache.k_codes.shape[3] + 2)


def run_decode(
    cache: TritonCache,
    query: torch.Tensor,
    output: torch.Tensor,
    sequences: Sequences,
    settings: Settings,
    workspace: torch.Tensor,
) -> None:
    """Attend for sequences of one new token, and no others; zeros where there is no context.

    Args:
        cache: what to attend over.
        query: [T, H, D], D contiguous.
        output: likewise; rows of these sequences are written.
        sequences: the batch.
        settings: the call.
        workspace: float32, at least `workspace_values`.
    """
    common, config = _decode_arguments(cache, query, sequences)
    k_codes, v_codes = cache.codes()
    pairs = cache.pairs()
    if pairs is not None:
        v_codes = pairs
    num_heads, num_kv_heads = cache.num_heads, k_codes.shape[1]
    count = _aligned(sequences.num_sequences * num_heads * config.splits)
    head_dim = query.shape[2]
    sums = workspace[: count * head_dim]
    largest = workspace[count * head_dim : count * (head_dim + 1)]
    totals = workspace[count * (head_dim + 1) : count * (head_dim + 2)]
    if config.splits == 1:
        sums = largest = totals = workspace[:0]
    decode_kernel[(num_kv_heads, config.splits, sequences.num_sequences)](
        query, output, sums, largest, totals,
        k_codes, v_codes, cache.k_scale, cache.v_scale, cache.q_scale, settings.sinks,
        sequences.query_starts, sequences.context_lens, sequences.block_table,
        settings.softmax_scale, settings.softcap,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        k_codes.stride(0), v_codes.stride(0), sequences.block_table.stride(0),
        WINDOW=settings.window,
        SOFTCAP=settings.softcap != 0.0,
        PAIRS=pairs is not None,
        TAIL_STAGES=config.stages if settings.window else 1,
        **common,
        num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip
    if config.splits == 1:
        return
    padded = max(2, 1 << (config.splits - 1).bit_length())
    combine_kernel[(num_heads, sequences.num_sequences)](
        output, sums, largest, totals, cache.v_scale, settings.sinks,
        sequences.query_starts, sequences.context_lens, output.stride(0), output.stride(1),
        GROUP=common["GROUP"],
        HEAD_DIM=head_dim,
        PADDED_DIM=common["PADDED_DIM"],
        SPLITS=config.splits,
        PADDED_SPLITS=padded,
        CHUNK=min(padded, 8),
        CASTS=cache.device.casts,
        SHIFT=common["SHIFT"],
        num_warps=1,
    )  # fmt: skip


def run_prefill(
    cache: TritonCache,
    query: torch.Tensor,
    output: torch.Tensor,
    sequences: Sequences,
    settings: Settings,
    *,
    skip_single: bool,
) -> None:
    """Attend for sequences of any number of new tokens, but with ``skip_single`` not for one.

    Args:
        cache: what to attend over.
        query: [T, H, D], D contiguous.
        output: likewise.
        sequences: the batch.
        settings: the call.
        skip_single: leave sequences of one new token to `run_decode`.
    """
    common, shape = _common_arguments(cache, query)
    products = (
        cache.q_scale is not None and cache.device.fp8_products and cache.format == "fp8_e4m3"
    )
    config = prefill_config(cache.device, shape, fp8_products=products)
    k_codes, v_codes = cache.codes()
    programs = sequences.num_tokens // config.tokens + sequences.num_sequences
    prefill_kernel[(programs, k_codes.shape[1])](
        query, output, k_codes, v_codes, cache.k_scale, cache.v_scale, cache.q_scale,
        settings.sinks, sequences.query_starts, sequences.context_lens, sequences.block_table,
        settings.softmax_scale, settings.softcap, sequences.num_sequences,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        k_codes.stride(0), v_codes.stride(0), sequences.block_table.stride(0),
        TOKENS=config.tokens,
        ROWS=config.rows,
        TILE=config.tile,
        WINDOW=settings.window,
        SOFTCAP=settings.softcap != 0.0,
        FP8_PRODUCTS=products,
        FP8_VALUES=products and config.fp8_values,
        SKIP_SINGLE=skip_single,
        STAGES=config.stages,
        **common,
        num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip


def _aligned(rows: int) -> int:
    """Return ``rows``, or more, so that what follows that many float32 values is aligned."""
    return -(-rows // 16) * 16


def _decode_arguments(
    cache: TritonCache, query: torch.Tensor, sequences: Sequences
) -> tuple[dict[str, Any], DecodeConfig]:
    common, shape = _common_arguments(cache, query)
    config = decode_config(
        cache.device, shape, sequences.num_sequences, sequences.max_context
    )  # fmt: skip
    return {
        **common,
        "ROWS": config.rows,
        "TILE": config.tile,
        "SPLITS": config.splits,
        "STAGES": config.stages,
    }, config


def _common_arguments(cache: TritonCache, query: torch.Tensor) -> tuple[dict[str, Any], Shape]:
    compute = cache.compute_dtype(query.dtype)
    shape = cache.shape(compute)
    fp8 = cache.q_scale is not None
    return {
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "PADDED_DIM": shape.padded_dim,
        "BLOCK_SIZE": cache.k_codes.shape[2],
        "FORMAT": cache.format,
        "COMPUTE": _TL_DTYPES[compute],
        "CASTS": cache.device.casts,
        # 2^8 is the format's of docs/numerics.md; float16 weights keep 11 bits down to 2^-28.
        "SHIFT": 8 if fp8 else 14 if compute == torch.float16 else 0,
        "FP8_WEIGHTS": fp8,
    }, shape
