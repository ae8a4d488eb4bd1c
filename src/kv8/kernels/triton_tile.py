"""Device functions: attention of a few query rows over one tile of keys, met step by step.

All attention kernels are made of these. Letters: R query rows, n keys of a tile, D head size. The
mathematics is that of docs/numerics.md: exponents to base 2, and a running maximum that is a whole
number, so that rescaling by a change of it is exact. Weights are held times 2^SHIFT, which cancels
in the end: float16 and e4m3 weights then keep their precision further down.
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
    elif tl.float16 == COMPUTE and query.dtype != tl.float16:
        exponent = tl.max(tl.abs(values), 1).to(tl.int32, bitcast=True) >> 23
        up = tl.minimum(127 + 127 + 14 - exponent, 253)
        factor = (up << 23).to(tl.float32, bitcast=True)
        back = ((254 - up) << 23).to(tl.float32, bitcast=True)
        return (values * factor[:, None]).to(tl.float16), back
    else:
        return round_to(values, COMPUTE, CASTS), tl.full([query.shape[0]], 1.0, tl.float32)


@triton.jit
def tile_logits(
    query,  # [R, D] of `prepare_query`
    k_codes,  # [D, n]
    factor,  # float32 [R], positive: products times this are logits
    softcap,  # float32, read if SOFTCAP
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    CASTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8_PRODUCTS: tl.constexpr,
):
    """Return float32 [R, n], and [R] that it is to be times to be logits to base 2."""
    if FP8_PRODUCTS:
        products = tl.dot(query, k_codes, out_dtype=tl.float32)
    else:
        products = multiply(query, widen_codes(k_codes, FORMAT, COMPUTE, CASTS), CASTS)
    if SOFTCAP:
        logits = products * factor[:, None] / softcap
        # tanh, exact at both ends, and in between as exact as float32 knows 1.
        capped = 1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2_E)) + 1.0)
        return capped, factor * 0.0 + softcap * LOG2_E
    else:
        # So far below any logit that matters that it only keeps -inf times zero from being NaN.
        return products, tl.maximum(factor * LOG2_E, 1.1754943508222875e-38)


@triton.jit
def weigh_tile(
    logits,  # float32 [R, n] and
    factor,  # float32 [R], of `tile_logits`; -inf for a hidden key
    largest,  # float32 [R], the running maximum
    total,  # float32 [R], the sum so far of weights
    SHIFT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return float32 weights [R, n], by how much what was summed is to shrink, maximum and sum."""
    larger = tl.maximum(largest, tl.ceil(tl.max(logits, 1) * factor))
    base = larger - SHIFT
    kept = largest - larger
    if MASKED:  # a row may have seen nothing yet
        base = tl.where(larger == float("-inf"), 0.0, base)
        kept = tl.where(larger == float("-inf"), 0.0, kept)
    weights = tl.exp2(logits * factor[:, None] - base[:, None])
    kept = tl.exp2(kept)
    return weights, kept, larger, total * kept + tl.sum(weights, 1)


@triton.jit
def weights_operand(weights, FP8_WEIGHTS: tl.constexpr, COMPUTE: tl.constexpr, CASTS: tl.constexpr):
    """Return float32 ``weights`` as they meet the values; in FP8 attention rounded to e4m3."""
    if FP8_WEIGHTS:
        codes = encode_fp8(weights, "fp8_e4m3", CASTS)
        return widen_codes(codes, "fp8_e4m3", COMPUTE, CASTS)
    else:
        return round_to(weights, COMPUTE, CASTS)


@triton.jit
def add_values(
    weighted,  # float32 [R, D], the sum so far of weights times values
    weights,  # float32 [R, n] of `weigh_tile`
    v_codes,  # [n, D]
    visible,  # bool [R, n], read if GUARDED
    FORMAT: tl.constexpr,
    COMPUTE: tl.constexpr,
    CASTS: tl.constexpr,
    GUARDED: tl.constexpr,
    FP8_WEIGHTS: tl.constexpr,
    FP8_VALUES: tl.constexpr,
):
    """Return ``weighted`` with one tile's values added."""
    if FP8_VALUES:
        # Matrix units sum FP8 products in fewer bits than float32 has: one tile's only. Given the
        # bound, the compiler does not let them go on from the sum of the tiles before.
        codes = encode_fp8(weights, "fp8_e4m3", CASTS)
        return weighted + tl.dot(
            codes, v_codes, max_num_imprecise_acc=codes.shape[1], out_dtype=tl.float32
        )
    else:
        operand = weights_operand(weights, FP8_WEIGHTS, COMPUTE, CASTS)
        values = widen_codes(v_codes, FORMAT, COMPUTE, CASTS)
        if GUARDED:
            values, weighted = _keep_apart(values, visible, weighted, CASTS)
        return multiply_add(operand, values, weighted, CASTS)


@triton.jit
def _keep_apart(values, visible, weighted, CASTS: tl.constexpr):
    """Let a value that is no number reach the rows that see it, and no other.

    A hidden key has weight zero, and zero times NaN is NaN: one broken token would take every
    earlier one in its tile along. Rows that see it are NaN from now on; then it is zero.
    """
    plain = to_float32(values, CASTS)
    broken = tl.abs(plain) == float("inf")
    broken = broken | (plain != plain)
    if tl.max(broken.to(tl.int32)) > 0:
        reached = tl.dot(visible.to(tl.float16), broken.to(tl.float16), out_dtype=tl.float32)
        weighted = tl.where(reached > 0, float("nan"), weighted)
        values = tl.where(broken, 0.0, values)
    return values, weighted


@triton.jit
def add_sinks(total, largest, sink, SHIFT: tl.constexpr):
    """Return ``total`` [R] with the weight of one more logit, ``sink`` [R], which has no value."""
    return total + tl.exp2(sink * LOG2_E - (largest - SHIFT))


@triton.jit
def load_keys_and_values(
    k_codes,  # where the head's codes begin in block 0
    v_codes,
    table,  # int32, one sequence's row of the block table
    tile,  # the tile's number: its first position is TILE times that
    low,  # positions from low up to limit are read and no others; checked if MASKED
    limit,
    k_block_stride,
    v_block_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,  # of v_codes' words, which may hold two codes
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return codes [D, n] of a tile's keys, [n, D] of its values, and bool [n]: which were read."""
    block, inside, read = locate_tile(table, tile, low, limit, BLOCK_SIZE, TILE, MASKED)
    k_rows = block * k_block_stride + inside * HEAD_DIM
    v_rows = block * v_block_stride + inside * VALUE_DIM
    k = load_tile(k_codes, k_rows, read, HEAD_DIM, PADDED_DIM, MASKED, True)
    v = load_tile(v_codes, v_rows, read, VALUE_DIM, PADDED_VALUE_DIM, MASKED, False)
    return k, v, read


@triton.jit
def locate_tile(
    table,  # int32, one sequence's row of the block table
    tile,  # the tile's number: its first position is TILE times that
    low,  # positions from low up to limit are looked up and no others; checked if MASKED
    limit,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return int64 block, offset in it, and whether it is to be read, of each position of a tile.

    What is not to be read was never stored or is out of date: any bytes, NaN among them, and the
    table's entries there are any numbers.
    """
    first = tile * TILE
    step = tl.arange(0, TILE)
    position = first + step
    read = (position >= low) & (position < limit)
    if BLOCK_SIZE % TILE == 0:  # one block holds the tile
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        return block, first % BLOCK_SIZE + step, read
    elif MASKED:
        block = tl.load(table + position // BLOCK_SIZE, mask=read, other=0).to(tl.int64)
        return block, position % BLOCK_SIZE, read
    else:
        block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        return block, position % BLOCK_SIZE, read


@triton.jit
def load_tile(
    codes,
    rows,  # int64 [n], where each row begins
    read,  # bool [n], checked if MASKED
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Return codes [n, D], or [D, n] if TRANSPOSED; zero where nothing is to be read."""
    dim = tl.arange(0, PADDED_DIM)
    if TRANSPOSED:
        at = codes + rows[None, :] + dim[:, None]
        if MASKED:
            return tl.load(at, mask=read[None, :] & (dim < DIM)[:, None], other=0.0)
        elif PADDED_DIM == DIM:
            return tl.load(at)
        else:
            return tl.load(at, mask=(dim < DIM)[:, None], other=0.0)
    else:
        at = codes + rows[:, None] + dim[None, :]
        if MASKED:
            return tl.load(at, mask=read[:, None] & (dim < DIM)[None, :], other=0.0)
        elif PADDED_DIM == DIM:
            return tl.load(at)
        else:
            return tl.load(at, mask=(dim < DIM)[None, :], other=0.0)
