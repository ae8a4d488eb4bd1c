"""Device code: ragged chunked prefill. Several new tokens a sequence over its stored codes."""

import triton
import triton.language as tl

from kv8.kernels.triton_cast import round_to
from kv8.kernels.triton_tile import (
    add_sinks,
    add_values,
    load_keys_and_values,
    prepare_query,
    tile_logits,
    weigh_tile,
)


@triton.jit(do_not_specialize=["num_sequences", "table_stride"])
def prefill_kernel(
    query,  # [T, H, D]
    output,  # [T, H, D]
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
    query_token_stride,
    query_head_stride,
    output_token_stride,
    output_head_stride,
    k_block_stride,
    v_block_stride,
    table_stride,
    GROUP: tl.constexpr,  # J, query heads of a KV head
    TOKENS: tl.constexpr,  # new tokens a program takes: TOKENS * J rows
    ROWS: tl.constexpr,  # at least that many, and 16
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    CASTS: tl.constexpr,
    SHIFT: tl.constexpr,
    FP8_WEIGHTS: tl.constexpr,
    FP8_PRODUCTS: tl.constexpr,
    FP8_VALUES: tl.constexpr,
    SKIP_SINGLE: tl.constexpr,  # sequences of one new token are the decode kernel's
    STAGES: tl.constexpr,
):
    """Some tokens of one sequence, all query heads of one KV head; the grid is [programs, K].

    Sequence s has the programs from query_starts[s] // TOKENS + s on: enough whatever its length,
    and found without the host. Those with the most keys to see start first.
    """
    kv_head = tl.program_id(1)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    s = _find_sequence(query_starts, program, num_sequences, TOKENS)
    start = tl.load(query_starts + s)
    num_new = tl.load(query_starts + s + 1) - start
    first_new = (program - (start // TOKENS + s)) * TOKENS
    if first_new >= num_new:
        return
    if SKIP_SINGLE:
        if num_new == 1:
            return
    context = tl.load(context_lens + s)
    row = tl.arange(0, ROWS)
    new = first_new + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (row < TOKENS * GROUP) & (new < num_new)
    dim = tl.arange(0, PADDED_DIM)
    row_mask = real[:, None] & (dim < HEAD_DIM)[None, :]
    token = (start + new).to(tl.int64)

    query += (token * query_token_stride + head * query_head_stride)[:, None] + dim[None, :]
    row_q_scale = None
    if q_scale is not None:
        row_q_scale = tl.load(q_scale + head)
    operand, factor = prepare_query(
        tl.load(query, mask=row_mask, other=0.0), row_q_scale, COMPUTE, FP8_PRODUCTS, CASTS
    )  # fmt: skip
    factor = factor * softmax_scale
    if k_scale is not None:
        factor = factor * tl.load(k_scale + kv_head)

    table = block_table + s.to(tl.int64) * table_stride
    k_codes += kv_head * (BLOCK_SIZE * HEAD_DIM)
    v_codes += kv_head * (BLOCK_SIZE * HEAD_DIM)
    # Keys from low up to limit are seen by some row, tiles from all_from up to all_to by every one.
    position = context - num_new + new
    first_position = context - num_new + first_new
    last_position = context - num_new + tl.minimum(first_new + TOKENS, num_new) - 1
    limit = last_position + 1
    all_to = (first_position + 1) // TILE
    if WINDOW > 0:
        low = tl.maximum(first_position - WINDOW + 1, 0)
        all_from = (tl.maximum(last_position - WINDOW + 1, 0) + TILE - 1) // TILE
    else:
        low = context * 0
        all_from = low
    begin = low // TILE
    end = (limit + TILE - 1) // TILE

    weighted = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        weighted, largest, total = _take_tile(
            weighted, largest, total, tile, operand, factor, position, low, limit,
            (tile < all_from) | (tile >= all_to),
            k_codes, v_codes, table, k_block_stride, v_block_stride, softcap,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, WINDOW, FORMAT, COMPUTE, CASTS, SHIFT,
            SOFTCAP, False, FP8_WEIGHTS, FP8_PRODUCTS, FP8_VALUES,
        )  # fmt: skip
    # A value that is no number has reached every row of its tile, since zero times NaN is NaN. That
    # is rare, so it costs: once more, and now it is kept from rows that do not see it.
    finite = tl.abs(weighted) < float("inf")
    if tl.min(finite.to(tl.int32)) == 0:
        weighted = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for tile in tl.range(begin, end, num_stages=1):
            weighted, largest, total = _take_tile(
                weighted, largest, total, tile, operand, factor, position, low, limit, True,
                k_codes, v_codes, table, k_block_stride, v_block_stride, softcap,
                HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, WINDOW, FORMAT, COMPUTE, CASTS, SHIFT,
                SOFTCAP, True, FP8_WEIGHTS, FP8_PRODUCTS, False,
            )  # fmt: skip

    if sinks is not None:
        total = add_sinks(total, largest, tl.load(sinks + head), SHIFT)
    result = weighted / total[:, None]
    if v_scale is not None:
        result = result * tl.load(v_scale + kv_head)
    output += (token * output_token_stride + head * output_head_stride)[:, None] + dim[None, :]
    tl.store(output, round_to(result, output.dtype.element_ty, CASTS), mask=row_mask)


@triton.jit
def _take_tile(
    weighted,
    largest,
    total,
    tile,
    operand,
    factor,
    position,  # int32 [ROWS], of the rows
    low,
    limit,
    at_edge,  # bool: whether there are keys that some row does not see
    k_codes,  # where the head's codes begin in block 0
    v_codes,
    table,
    k_block_stride,
    v_block_stride,
    softcap,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    CASTS: tl.constexpr,
    SHIFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GUARDED: tl.constexpr,
    FP8_WEIGHTS: tl.constexpr,
    FP8_PRODUCTS: tl.constexpr,
    FP8_VALUES: tl.constexpr,
):
    """Return the sums and the maximum with one tile of keys taken in."""
    k, v, read = load_keys_and_values(
        k_codes, v_codes, table, tile, low, limit, k_block_stride, v_block_stride,
        HEAD_DIM, PADDED_DIM, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE, True,
    )  # fmt: skip
    logits, factor = tile_logits(
        operand, k, factor, softcap, FORMAT, COMPUTE, CASTS, SOFTCAP, FP8_PRODUCTS
    )  # fmt: skip
    distance = position[:, None] - (tile * TILE + tl.arange(0, TILE))[None, :]
    visible = (distance >= 0) & read[None, :]
    if WINDOW > 0:
        visible = visible & (distance < WINDOW)
    if at_edge:
        logits = tl.where(visible, logits, float("-inf"))
    weights, kept, largest, total = weigh_tile(logits, factor, largest, total, SHIFT, True)
    weighted = add_values(
        weighted * kept[:, None], weights, v, visible,
        FORMAT, COMPUTE, CASTS, GUARDED, FP8_WEIGHTS, FP8_VALUES,
    )  # fmt: skip
    return weighted, largest, total


@triton.jit
def _find_sequence(query_starts, program, num_sequences, TOKENS: tl.constexpr):
    """Return the last sequence whose first program is not after ``program``."""
    low = program * 0
    high = low + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= program:
            low = middle
        else:
            high = middle
    return low
