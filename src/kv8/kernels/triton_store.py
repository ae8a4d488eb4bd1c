"""Device code: the store. Scale, clamp, round, scatter to slots and count, in one pass."""

import triton
import triton.language as tl

from kv8.kernels.triton_cast import clamp, encode_fp8, round_to, to_float32


@triton.jit(do_not_specialize=["num_rows"])
def store_kernel(
    key,  # [T, K, D], D contiguous
    value,
    k_codes,  # [N, K, B, D], all but dimension 0 contiguous
    v_codes,
    k_scale,  # float32 [K], or None
    v_scale,
    slots,  # int64 [T]; -1 for a row that is not stored
    k_counts,  # int64 [4]: stored, saturated, underflowed, NaN, added to; or None
    v_counts,
    num_rows,  # T * K
    key_token_stride,  # strides in values
    key_head_stride,
    value_token_stride,
    value_head_stride,
    k_block_stride,
    v_block_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    CASTS: tl.constexpr,
):
    """Store ROWS rows (token, head) of the keys, or of the values: the grid is [rows, 2]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // NUM_KV_HEADS).to(tl.int64)
    head = row % NUM_KV_HEADS
    slot = tl.load(slots + token, mask=row < num_rows, other=-1)
    stored = slot >= 0
    block = slot // BLOCK_SIZE
    inside = (head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
    if tl.program_id(1) == 0:
        source = token * key_token_stride + head * key_head_stride
        target = block * k_block_stride + inside
        _store_rows(
            key, k_codes, k_scale, k_counts, source, target, head, stored,
            HEAD_DIM, PADDED_DIM, FORMAT, LARGEST, SMALLEST, CASTS,
        )  # fmt: skip
    else:
        source = token * value_token_stride + head * value_head_stride
        target = block * v_block_stride + inside
        _store_rows(
            value, v_codes, v_scale, v_counts, source, target, head, stored,
            HEAD_DIM, PADDED_DIM, FORMAT, LARGEST, SMALLEST, CASTS,
        )  # fmt: skip


@triton.jit
def _store_rows(
    values,
    codes,
    scale,
    counts,
    source,  # int64 [ROWS], where each row begins in values
    target,  # int64 [ROWS], where in codes
    head,  # [ROWS]
    stored,  # bool [ROWS]
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    CASTS: tl.constexpr,
):
    dim = tl.arange(0, PADDED_DIM)
    mask = stored[:, None] & (dim < HEAD_DIM)[None, :]
    given = tl.load(values + source[:, None] + dim[None, :], mask=mask, other=0.0)
    target = codes + target[:, None] + dim[None, :]
    # The model's own type, and float32, hold every value: nothing is lost, infinities included.
    exact: tl.constexpr = given.dtype == codes.dtype.element_ty or FORMAT == "float32"
    if exact:
        scaled = to_float32(given, CASTS)
        if FORMAT == "float32":
            tl.store(target, scaled, mask=mask)
        else:
            tl.store(target, given, mask=mask)
    else:
        scaled = to_float32(given, CASTS)
        if scale is not None:
            scaled = _divide(scaled, tl.load(scale + head, mask=stored, other=1.0), CASTS)
        inside = clamp(scaled, LARGEST)
        if FORMAT == "fp8_e4m3" or FORMAT == "fp8_e5m2":
            tl.store(target, encode_fp8(inside, FORMAT, CASTS), mask=mask)
        else:
            tl.store(target, round_to(inside, codes.dtype.element_ty, CASTS), mask=mask)
    if counts is not None:
        # Atomic adds of integers: their order changes nothing. What did not happen is not added.
        tl.atomic_add(counts, tl.sum(stored.to(tl.int64), 0) * HEAD_DIM, sem="relaxed")
        if not exact:
            magnitude = tl.abs(scaled)
            # Half the smallest code lies between it and zero; the tie goes to the even one, zero.
            nonzero = to_float32(given, CASTS) != 0.0
            _count(counts + 1, magnitude > LARGEST)
            _count(counts + 2, (magnitude <= SMALLEST / 2) & nonzero)
        _count(counts + 3, scaled != scaled)


@triton.jit
def _divide(
    values,  # float32 [ROWS, D]
    divisor,  # float32 [ROWS], positive
    CASTS: tl.constexpr,
):
    """Return the quotients, rounded to nearest even.

    A division is an estimate, its correction and a check of special cases, for each value anew.
    Here the divisor is a row's, and so is its inverse. By that a value's estimate is off by a step
    at most; the remainder is exact in a fused multiply-add, and adding it back gives the true
    quotient (Markstein, IBM Journal of Research and Development 34, 1990), unless something
    underflows.
    """
    smallest = tl.min(divisor, 0)
    largest = tl.max(divisor, 0)
    quotient = values
    if CASTS != "interpreter":  # which fuses nothing
        if (smallest > 8.67361737988403547e-19) & (largest < 1152921504606846976.0):  # 2^±60
            inverse = tl.div_rn(divisor * 0.0 + 1.0, divisor)
            inverse = tl.broadcast_to(inverse[:, None], values.shape)
            divisors = tl.broadcast_to(divisor[:, None], values.shape)
            estimate = values * inverse
            corrected = tl.fma(tl.fma(-estimate, divisors, values), inverse, estimate)
            quotient = tl.where(tl.abs(estimate) < float("inf"), corrected, estimate)
        else:
            quotient = tl.div_rn(values, tl.broadcast_to(divisor[:, None], values.shape))
    else:
        quotient = tl.div_rn(values, tl.broadcast_to(divisor[:, None], values.shape))
    return quotient


@triton.jit
def _count(counter, events):
    found = tl.sum(tl.sum(events.to(tl.int32), 1), 0)
    tl.atomic_add(counter, found.to(tl.int64), mask=found > 0, sem="relaxed")
