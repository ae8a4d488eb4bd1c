"""Device code: what lies between a decoder layer's matrix products. Norm, rotary embedding, gate.

Everything is computed in float32 and rounded where transformers' own code rounds.
"""

# Compiled by Triton, to its own rules of typing and naming.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x,  # [T, heads * SIZE], or [T, SIZE]
    residual,  # [T, SIZE] added to x before, or None; only without heads
    weight,  # [SIZE]
    total,  # [T, SIZE], where the sum goes; only with a residual
    out,  # like x
    x_stride,
    residual_stride,
    out_stride,
    epsilon,
    multiplier,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ORDER: tl.constexpr,  # as in `kv8.models.decoder_parts.Norm`
    MULTIPLIES: tl.constexpr,
):
    """Root mean square norm of each row, or each head of a row; the grid is [T, heads]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, PADDED)
    real = at < SIZE
    narrow = out.dtype.element_ty
    value = tl.load(x + row * x_stride + head * SIZE + at, mask=real, other=0.0).to(tl.float32)
    if residual is not None:
        if MULTIPLIES:
            value = (value * multiplier).to(narrow).to(tl.float32)
        value += tl.load(residual + row * residual_stride + at, mask=real, other=0.0).to(tl.float32)
        value = value.to(narrow).to(tl.float32)
        tl.store(total + row * SIZE + at, value.to(narrow), mask=real)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / SIZE + epsilon)
    normed = value * scale
    factor = tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    if ORDER == 0:
        result = factor * normed.to(narrow).to(tl.float32)
    elif ORDER == 1:
        result = normed * (1.0 + factor)
    else:
        result = factor * normed
    tl.store(out + row * out_stride + head * SIZE + at, result.to(narrow), mask=real)


@triton.jit
def rotary_kernel(
    x,  # [T, heads, HEAD_DIM], changed in place
    cosines,  # [T, 2 * HALF]
    sines,
    token_stride,
    angle_stride,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEADS: tl.constexpr,  # of one program
):
    """Rotate the first 2 * HALF values of each head; the grid is [T, heads / HEADS]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, PADDED_HALF)
    real = (head < num_heads)[:, None] & (at < HALF)[None, :]
    narrow = x.dtype.element_ty
    wide = cosines.dtype.element_ty  # products are rounded to the angles' type, if that is narrow
    first = x + row * token_stride + head[:, None] * HEAD_DIM + at[None, :]
    low = tl.load(first, mask=real, other=0.0).to(tl.float32)
    high = tl.load(first + HALF, mask=real, other=0.0).to(tl.float32)
    angle = row * angle_stride + at
    known = at < HALF
    low_cosine = tl.load(cosines + angle, mask=known, other=0.0).to(tl.float32)[None, :]
    low_sine = tl.load(sines + angle, mask=known, other=0.0).to(tl.float32)[None, :]
    high_cosine = tl.load(cosines + angle + HALF, mask=known, other=0.0).to(tl.float32)[None, :]
    high_sine = tl.load(sines + angle + HALF, mask=known, other=0.0).to(tl.float32)[None, :]
    new_low = (low * low_cosine).to(wide).to(tl.float32)
    new_low -= (high * low_sine).to(wide).to(tl.float32)
    new_high = (high * high_cosine).to(wide).to(tl.float32)
    new_high += (low * high_sine).to(wide).to(tl.float32)
    tl.store(first, new_low.to(narrow), mask=real)
    tl.store(first + HALF, new_high.to(narrow), mask=real)


@triton.jit
def gate_kernel(
    gate,  # [T, size]
    up,  # [T, size]
    out,  # [T, size]
    gate_stride,
    up_stride,
    out_stride,
    size,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,  # as in `kv8.models.decoder_parts.DecoderParts`
):
    """Activation of the gate times up; the grid is [T, size / BLOCK]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    narrow = out.dtype.element_ty
    g = tl.load(gate + row * gate_stride + at, mask=real, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + at, mask=real, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        active = g / (1.0 + tl.exp(-g))
    else:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        active = g / (1.0 + tl.exp(-2.0 * inner))  # g/2 * (1 + tanh(inner)), without cancellation
    active = active.to(narrow).to(tl.float32)
    tl.store(out + row * out_stride + at, (active * u).to(narrow), mask=real)
