"""Launches of the Triton kernels: tensors and numbers in, nothing of layers, batches or engines.

A launch costs the host some ten microseconds and never waits for the device.
"""

from typing import Any

import torch
import triton.language as tl

from kv8.kernels.triton_cache import Sequences, Settings, TritonCache
from kv8.kernels.triton_config import (
    MAX_PARTS,
    DecodeConfig,
    Shape,
    decode_config,
    power_of_two,
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


def workspace_values(cache: TritonCache, query: torch.dtype, num_sequences: int, bound: int) -> int:
    """Return how many float32 values `run_decode` needs for partial results.

    ``bound``: no context is longer.
    """
    config = decode_config(cache.device, cache.shape(cache.compute_dtype(query)))
    programs = config.programs(num_sequences, bound)
    if programs == num_sequences:
        return 0
    return _aligned(programs * cache.num_heads) * (cache.k_codes.shape[3] + 2)


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
    common, config = _decode_arguments(cache, query, sequences, settings)
    k_codes, v_codes = cache.codes()
    pairs = cache.pairs()
    if pairs is not None:
        v_codes = pairs
    num_heads, num_kv_heads, num_sequences = (
        cache.num_heads, k_codes.shape[1], sequences.num_sequences,
    )  # fmt: skip
    # As many as there are sequences, if none can have more than one part.
    programs = config.programs(num_sequences, sequences.max_context)
    merges = programs > num_sequences
    count = _aligned(programs * num_heads) if merges else 0
    head_dim = query.shape[2]
    sums = workspace[: count * head_dim]
    largest = workspace[count * head_dim : count * (head_dim + 1)]
    totals = workspace[count * (head_dim + 1) : count * (head_dim + 2)]
    decode_kernel[(num_kv_heads, programs)](
        query, output, sums, largest, totals,
        k_codes, v_codes, cache.k_scale, cache.v_scale, cache.q_scale, settings.sinks,
        sequences.query_starts, sequences.context_lens, sequences.block_table,
        settings.softmax_scale, settings.softcap, num_sequences, config.parts,
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        k_codes.stride(0), v_codes.stride(0), sequences.block_table.stride(0),
        SOFTCAP=settings.softcap != 0.0,
        PAIRS=pairs is not None,
        TAIL_STAGES=config.stages if settings.window else 1,
        STAGES=config.stages,
        ROWS=config.rows,
        **common,
        num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip
    if not merges:
        return
    merged = (
        "GROUP", "HEAD_DIM", "PADDED_DIM", "TILE", "LEAST", "MOST", "PADDED_SEQUENCES", "WINDOW",
        "CASTS", "SHIFT",
    )  # fmt: skip
    combine_kernel[(num_heads, num_sequences)](
        output, sums, largest, totals, cache.v_scale, settings.sinks,
        sequences.query_starts, sequences.context_lens, num_sequences, config.parts, programs,
        output.stride(0), output.stride(1),
        CHUNK=max(1, 2048 // common["PADDED_DIM"]),
        **{name: common[name] for name in merged},
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
    cache: TritonCache, query: torch.Tensor, sequences: Sequences, settings: Settings
) -> tuple[dict[str, Any], DecodeConfig]:
    common, shape = _common_arguments(cache, query)
    config = decode_config(cache.device, shape)
    return {
        **common,
        "TILE": config.tile,
        "LEAST": config.least,
        "MOST": MAX_PARTS,
        # One build serves every batch of up to so many.
        "PADDED_SEQUENCES": max(64, power_of_two(sequences.num_sequences)),
        "WINDOW": settings.window,
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
