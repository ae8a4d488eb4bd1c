"""Device functions: attention of a few query rows over one tile of keys, met step by step.

All attention kernels are made of these. Letters: R query rows, n keys of a tile, D head size. The
mathematics is docs/numerics.md's: exponents to base 2, and a running maximum that is a whole number,
so that rescaling by a change of it is exact. Weights are held times 2^SHIFT, which cancels in the
end: float16 and e4m3 weights then keep their precision further down.
"""

import triton
import triton.language as tl

from kv8.kernels.triton_cast import (
    clamp,
    encode_fp8,
    multiply,
    multiply_add,
    round_to,
    to_float32,
    widen_codes,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def prepare_query(
    query,  # [R, D], in the model's dtype; zeros where there is nothing
    q_scale,  # float32 [R], or None: FP8 attention rounds the query to e4m3
    COMPUTE: tl.constexpr,
    FP8_PRODUCTS: tl.constexpr,
    CASTS: tl.constexpr,
):
    """Return the query as an operand of products, and float32 [R], what its rows are to be times.

    Nothing overflows. A row that has to become float16 is first brought to [2^14, 2^15) by a power
    of two: bfloat16 values down to 2^-28 of the row's largest are then exact, and smaller ones are
    off by 2^-39 of it, for any finite query.
    """
    values = to_float32(query, CASTS)
    if q_scale is not None:
        scaled = tl.div_rn(values, tl.broadcast_to(q_scale[:, None], values.shape))
        codes = encode_fp8(clamp(scaled, 448.0), "fp8_e4m3", CASTS)
        if FP8_PRODUCTS:
            return codes, q_scale
        else:
            return widen_codes(codes, "fp8_e4m3", COMPUTE, CASTS), q_scale
    elif COMPUTE == tl.float16 and query.dtype != tl.float16:
        exponent = tl.max(tl.abs(values), 1).to(tl.int32, bitcast=True) >> 23
        up = tl.minimum(127 + 127 + 14 - exponent, 253)
        factor = (up << 23).to(tl.float32, bitcast=True)
        back = ((254 - up) << 23).to(tl.float32, bitcast=True)
        return (values * factor[:, None]).to(tl.float16), back
    else:
        return round_to(values, COMPUTE, CASTS), tl.full([query.shape[0]], 1.0, tl.float32)


@triton.jit
def attend_tile(
    query,  # [R, D] of `prepare_query`
    k_codes,  # [D, n]
    v_codes,  # [n, D]
    visible,  # bool [R, n] or [1, n]; read if MASKED
    weighted,  # float32 [R, D], the sum so far of weights times values
    largest,  # float32 [R], the running maximum
    total,  # float32 [R], the sum so far of weights
    factor,  # float32 [R]: products times this are logits
    softcap,  # float32, read if SOFTCAP
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    CASTS: tl.constexpr,
    SHIFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    GUARDED: tl.constexpr,
    FP8_WEIGHTS: tl.constexpr,
    FP8_PRODUCTS: tl.constexpr,
    FP8_VALUES: tl.constexpr,
):
    """Return ``weighted``, ``largest`` and ``total`` with this tile's keys taken in."""
    if FP8_PRODUCTS:
        products = tl.dot(query, k_codes, out_dtype=tl.float32)
    else:
        products = multiply(query, widen_codes(k_codes, FORMAT, COMPUTE, CASTS), CASTS)
    if SOFTCAP:
        logits = products * factor[:, None] / softcap
        # tanh, exact at both ends, and in between as exact as float32 knows 1.
        logits = 1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2_E)) + 1.0)
        logits = logits * (softcap * LOG2_E)
    else:
        logits = products * (factor * LOG2_E)[:, None]
    if MASKED:
        logits = tl.where(visible, logits, float("-inf"))
    larger = tl.maximum(largest, tl.ceil(tl.max(logits, 1)))
    base = larger - SHIFT
    kept = largest - larger
    if MASKED:  # a row may have seen nothing yet
        base = tl.where(larger == float("-inf"), 0.0, base)
        kept = tl.where(larger == float("-inf"), 0.0, kept)
    weights = tl.exp2(logits - base[:, None])
    kept = tl.exp2(kept)
    total = total * kept + tl.sum(weights, 1)
    weighted = weighted * kept[:, None]
    if FP8_VALUES:
        # The matrix unit sums FP8 products in fewer bits than float32 has: one tile's only.
        codes = encode_fp8(weights, "fp8_e4m3", CASTS)
        weighted += tl.dot(codes, v_codes, out_dtype=tl.float32)
    else:
        if FP8_WEIGHTS:
            codes = encode_fp8(weights, "fp8_e4m3", CASTS)
            operand = widen_codes(codes, "fp8_e4m3", COMPUTE, CASTS)
        else:
            operand = round_to(weights, COMPUTE, CASTS)
        values = widen_codes(v_codes, FORMAT, COMPUTE, CASTS)
        if GUARDED:
            values, weighted = _keep_apart(values, visible, weighted, CASTS)
        weighted = multiply_add(operand, values, weighted, CASTS)
    return weighted, larger, total


@triton.jit
def _keep_apart(values, visible, weighted, CASTS: tl.constexpr):
    """Let a value that is no number reach the rows that see it, and no other.

    A hidden key has weight zero, and zero times NaN is NaN: one broken token would take every
    earlier one in its tile along. Rows that see it are NaN from now on; then it is zero.
    """
    plain = to_float32(values, CASTS)
    broken = tl.abs(plain) == float("inf")
    broken = broken | (plain != plain)
    if tl.max(tl.max(broken.to(tl.int32), 1), 0) > 0:
        reached = tl.dot(visible.to(tl.float16), broken.to(tl.float16), out_dtype=tl.float32)
        weighted = tl.where(reached > 0, float("nan"), weighted)
        values = tl.where(broken, 0.0, values)
    return values, weighted


@triton.jit
def add_sinks(total, largest, sink, SHIFT: tl.constexpr):
    """Return ``total`` [R] with the weight of one more logit, ``sink`` [R], which has no value."""
    return total + tl.exp2(sink * LOG2_E - (largest - SHIFT))


@triton.jit
def take_tile(
    weighted,  # these three as in `attend_tile`
    largest,
    total,
    tile,  # the tile's number: its first position is TILE times that
    operand,  # the query of `prepare_query`, and what its products are to be times
    factor,
    row_position,  # int32 [R]; read if CAUSAL
    low,  # positions from low up to limit are read and no others; checked if MASKED
    limit,
    k_codes,  # where the head's codes begin in block 0
    v_codes,
    table,  # int32, one sequence's row of the block table
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
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    FP8_WEIGHTS: tl.constexpr,
    FP8_PRODUCTS: tl.constexpr,
    FP8_VALUES: tl.constexpr,
):
    """Read one tile of the paged cache, and return what `attend_tile` makes of it."""
    first = tile * TILE
    step = tl.arange(0, TILE)
    dim = tl.arange(0, PADDED_DIM)
    position = first + step
    read = (position >= low) & (position < limit)
    if BLOCK_SIZE % TILE == 0:  # one block holds the tile
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        inside = (first % BLOCK_SIZE + step) * HEAD_DIM
    else:
        column = table + position // BLOCK_SIZE
        if MASKED:
            block = tl.load(column, mask=read, other=0).to(tl.int64)
        else:
            block = tl.load(column).to(tl.int64)
        inside = (position % BLOCK_SIZE) * HEAD_DIM
    k_at = k_codes + (block * k_block_stride + inside)[None, :] + dim[:, None]
    v_at = v_codes + (block * v_block_stride + inside)[:, None] + dim[None, :]
    whole: tl.constexpr = PADDED_DIM == HEAD_DIM
    # What lies outside was never stored or is out of date: any bytes, NaN among them.
    if MASKED:
        k = tl.load(k_at, mask=read[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=read[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    elif whole:
        k = tl.load(k_at)
        v = tl.load(v_at)
    else:
        k = tl.load(k_at, mask=(dim < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    visible = read[None, :]
    if CAUSAL and MASKED:
        distance = row_position[:, None] - position[None, :]
        visible = visible & (distance >= 0)
        if WINDOW > 0:
            visible = visible & (distance < WINDOW)
    return attend_tile(
        operand, k, v, visible, weighted, largest, total, factor, softcap,
        FORMAT, COMPUTE, CASTS, SHIFT, SOFTCAP, MASKED, CAUSAL and MASKED,
        FP8_WEIGHTS, FP8_PRODUCTS, FP8_VALUES,
    )  # fmt: skip
