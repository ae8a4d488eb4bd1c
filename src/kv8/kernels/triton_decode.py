"""Device code: decode. One new token a sequence over its stored codes, split over programs."""

import triton
import triton.language as tl

from kv8.kernels.triton_cast import multiply_add, round_to, widen_pairs
from kv8.kernels.triton_parts import find_part, first_tile_of, plan_parts
from kv8.kernels.triton_tile import (
    add_sinks,
    add_values,
    load_keys_and_values,
    prepare_query,
    tile_logits,
    weigh_tile,
    weights_operand,
)


@triton.jit(do_not_specialize=["num_sequences", "parts", "table_stride"])
def decode_kernel(
    query,  # [T, H, D]
    output,  # [T, H, D]; written for a sequence of one part
    partial_sums,  # float32 [K, programs, J, D], for others: weights times values
    partial_largest,  # float32 [K, programs, J]
    partial_totals,  # float32 [K, programs, J]
    k_codes,  # [N, K, B, D]
    v_codes,
    k_scale,  # float32 [K], or None
    v_scale,
    q_scale,  # float32 [H], or None
    sinks,  # float32 [H], or None
    query_starts,  # int32 [S + 1]
    context_lens,  # int32 [S]
    block_table,  # int32 [S, M]
    softmax_scale,
    softcap,
    num_sequences,
    parts,  # as in `plan_parts`
    query_token_stride,
    query_head_stride,
    output_token_stride,
    output_head_stride,
    k_block_stride,
    v_block_stride,
    table_stride,
    GROUP: tl.constexpr,  # J, query heads of a KV head
    ROWS: tl.constexpr,  # at least J, and 16
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,  # as in `plan_parts`
    MOST: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for none
    SOFTCAP: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    CASTS: tl.constexpr,
    SHIFT: tl.constexpr,
    FP8_WEIGHTS: tl.constexpr,
    PAIRS: tl.constexpr,  # v_codes come as 16-bit words of two codes, v_block_stride too
    STAGES: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
):
    """All query heads of one KV head over one part of a context; the grid is [K, programs].

    Which part, each program finds from the lengths, here on the device: a grid fixed in advance
    serves any, and programs beyond the last part have nothing to do. Sequences of more than one new
    token are left to the prefill kernel, those without context get zeros.
    """
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    count, ends = plan_parts(
        query_starts, context_lens, num_sequences, parts, WINDOW, TILE, LEAST, MOST,
        PADDED_SEQUENCES,
    )  # fmt: skip
    s, part, num_parts = find_part(count, ends, program, num_sequences, PADDED_SEQUENCES)
    if s >= num_sequences:
        return
    token = tl.load(query_starts + s)
    context = tl.load(context_lens + s)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    real = row < GROUP
    head = kv_head * GROUP + row

    query += token.to(tl.int64) * query_token_stride
    query = tl.load(
        query + head[:, None] * query_head_stride + dim[None, :],
        mask=real[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    row_q_scale = None
    if q_scale is not None:
        row_q_scale = tl.load(q_scale + head, mask=real, other=1.0)
    operand, factor = prepare_query(query, row_q_scale, COMPUTE, False, CASTS)
    factor = factor * softmax_scale
    if k_scale is not None:
        factor = factor * tl.load(k_scale + kv_head)

    # V's words, and the sums over them: all of the head size, or with PAIRS its two halves.
    value_dim: tl.constexpr = HEAD_DIM // 2 if PAIRS else HEAD_DIM
    padded_value_dim: tl.constexpr = PADDED_DIM // 2 if PAIRS else PADDED_DIM
    sums = tl.zeros([ROWS, padded_value_dim], tl.float32)
    odd_sums = tl.zeros([ROWS, padded_value_dim if PAIRS else 1], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    table = block_table + s.to(tl.int64) * table_stride
    k_codes += kv_head * (BLOCK_SIZE * HEAD_DIM)
    v_codes += kv_head * (BLOCK_SIZE * value_dim)

    low = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else context * 0
    first_tile = first_tile_of(context, WINDOW, TILE)
    last_tile = (context + TILE - 1) // TILE
    begin = first_tile + (last_tile - first_tile) * part // num_parts
    end = first_tile + (last_tile - first_tile) * (part + 1) // num_parts
    # A tile whose keys are all seen needs no mask. A window is short: all of its tiles have one.
    whole = begin if WINDOW > 0 else tl.minimum(end, context // TILE)
    for tile in tl.range(begin, whole, num_stages=STAGES):
        sums, odd_sums, largest, total = _take_tile(
            sums, odd_sums, largest, total, tile, operand, factor, low, context,
            k_codes, v_codes, table, k_block_stride, v_block_stride, softcap,
            HEAD_DIM, PADDED_DIM, value_dim, padded_value_dim, BLOCK_SIZE, TILE,
            FORMAT, COMPUTE, CASTS, SHIFT, SOFTCAP, False, FP8_WEIGHTS, PAIRS,
        )  # fmt: skip
    for tile in tl.range(tl.maximum(begin, whole), end, num_stages=TAIL_STAGES):
        sums, odd_sums, largest, total = _take_tile(
            sums, odd_sums, largest, total, tile, operand, factor, low, context,
            k_codes, v_codes, table, k_block_stride, v_block_stride, softcap,
            HEAD_DIM, PADDED_DIM, value_dim, padded_value_dim, BLOCK_SIZE, TILE,
            FORMAT, COMPUTE, CASTS, SHIFT, SOFTCAP, True, FP8_WEIGHTS, PAIRS,
        )  # fmt: skip

    if num_parts == 1:
        if sinks is not None:
            total = add_sinks(total, largest, tl.load(sinks + head, mask=real, other=0.0), SHIFT)
        scale = 1.0 / total
        if v_scale is not None:
            scale = scale * tl.load(v_scale + kv_head)
        # Nothing to see is nothing, not 0 / 0.
        result = tl.where(context > 0, sums * scale[:, None], 0.0)
        odd_result = tl.where(context > 0, odd_sums * scale[:, None], 0.0)
        to = output + token.to(tl.int64) * output_token_stride + head * output_head_stride
        _write(to, result, odd_result, real, value_dim, padded_value_dim, CASTS, PAIRS)
    else:
        at = (kv_head.to(tl.int64) * tl.num_programs(1) + program) * GROUP + row
        tl.store(partial_largest + at, largest, mask=real)
        tl.store(partial_totals + at, total, mask=real)
        partial = partial_sums + at * HEAD_DIM
        _write(partial, sums, odd_sums, real, value_dim, padded_value_dim, CASTS, PAIRS)


@triton.jit
def _take_tile(
    sums,
    odd_sums,
    largest,
    total,
    tile,
    operand,
    factor,
    low,
    context,
    k_codes,  # where the head's codes begin in block 0
    v_codes,
    table,
    k_block_stride,
    v_block_stride,
    softcap,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    CASTS: tl.constexpr,
    SHIFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    FP8_WEIGHTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Return the sums and the maximum with one tile of keys taken in."""
    k, v, read = load_keys_and_values(
        k_codes, v_codes, table, tile, low, context, k_block_stride, v_block_stride,
        HEAD_DIM, PADDED_DIM, VALUE_DIM, PADDED_VALUE_DIM, BLOCK_SIZE, TILE, MASKED,
    )  # fmt: skip
    logits, factor = tile_logits(
        operand, k, factor, softcap, FORMAT, COMPUTE, CASTS, SOFTCAP, False
    )  # fmt: skip
    if MASKED:
        logits = tl.where(read[None, :], logits, float("-inf"))
    weights, kept, largest, total = weigh_tile(logits, factor, largest, total, SHIFT, MASKED)
    if PAIRS:
        weights = weights_operand(weights, FP8_WEIGHTS, COMPUTE, CASTS)
        even, odd = widen_pairs(v, FORMAT, COMPUTE, CASTS)
        sums = multiply_add(weights, even, sums * kept[:, None], CASTS)
        odd_sums = multiply_add(weights, odd, odd_sums * kept[:, None], CASTS)
    else:
        sums = add_values(
            sums * kept[:, None], weights, v, None,
            FORMAT, COMPUTE, CASTS, False, FP8_WEIGHTS, False,
        )  # fmt: skip
    return sums, odd_sums, largest, total


@triton.jit
def _write(
    rows,  # pointers [ROWS]
    sums,
    odd_sums,
    mask,  # bool [ROWS]
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    CASTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    dim = tl.arange(0, PADDED_VALUE_DIM)
    mask = mask[:, None] & (dim < VALUE_DIM)[None, :]
    if PAIRS:
        at = rows[:, None] + 2 * dim[None, :]
        tl.store(at, round_to(sums, rows.dtype.element_ty, CASTS), mask=mask)
        tl.store(at + 1, round_to(odd_sums, rows.dtype.element_ty, CASTS), mask=mask)
    else:
        at = rows[:, None] + dim[None, :]
        tl.store(at, round_to(sums, rows.dtype.element_ty, CASTS), mask=mask)


@triton.jit(do_not_specialize=["num_sequences", "parts", "num_programs"])
def combine_kernel(
    output,  # [T, H, D]
    partial_sums,  # as in `decode_kernel`
    partial_largest,
    partial_totals,
    v_scale,
    sinks,
    query_starts,
    context_lens,
    num_sequences,
    parts,
    num_programs,  # a KV head, of `decode_kernel`
    output_token_stride,
    output_head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    PADDED_SEQUENCES: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CASTS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Merge the parts of one query head, in order; the grid is [H, S]."""
    head = tl.program_id(0)
    s = tl.program_id(1)
    count, ends = plan_parts(
        query_starts, context_lens, num_sequences, parts, WINDOW, TILE, LEAST, MOST,
        PADDED_SEQUENCES,
    )  # fmt: skip
    mine = tl.arange(0, PADDED_SEQUENCES) == s
    num_parts = tl.sum(tl.where(mine, count, 0), 0)
    if num_parts < 2:  # its one program wrote the output
        return
    first_part = tl.sum(tl.where(mine, ends, 0), 0) - num_parts
    kv_head = (head // GROUP).to(tl.int64)
    at = (kv_head * num_programs + first_part) * GROUP + head % GROUP
    part = tl.arange(0, MOST)
    known = part < num_parts
    largest = tl.load(partial_largest + at + part * GROUP, mask=known, other=float("-inf"))
    totals = tl.load(partial_totals + at + part * GROUP, mask=known, other=0.0)
    base = tl.max(largest, 0)  # every part sees a key: a number
    total = tl.sum(totals * tl.exp2(largest - base), 0)
    dim = tl.arange(0, PADDED_DIM)
    result = tl.zeros([PADDED_DIM], tl.float32)
    for first in range(0, num_parts, CHUNK):
        some = first + tl.arange(0, CHUNK)
        row = at + some * GROUP
        some_known = some < num_parts
        some_largest = tl.load(partial_largest + row, mask=some_known, other=float("-inf"))
        sums = tl.load(
            partial_sums + row[:, None] * HEAD_DIM + dim[None, :],
            mask=some_known[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        result += tl.sum(sums * tl.exp2(some_largest - base)[:, None], 0)
    if sinks is not None:
        total = add_sinks(total, base, tl.load(sinks + head), SHIFT)
    result = result / total
    if v_scale is not None:
        result = result * tl.load(v_scale + kv_head)
    token = tl.load(query_starts + s).to(tl.int64)
    output += token * output_token_stride + head * output_head_stride
    tl.store(output + dim, round_to(result, output.dtype.element_ty, CASTS), mask=dim < HEAD_DIM)
