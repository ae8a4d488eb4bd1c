"""Device functions: values to stored codes and back, by hardware casts or by integer arithmetic.

CASTS says how, at compile time:

- ``hardware``: cast instructions for FP8 (NVIDIA from compute capability 8.9). Codes come typed.
- ``bits``: integer arithmetic, for GPUs without them. FP8 codes come as unsigned bytes.
- ``interpreter``: likewise, and for bfloat16 too: Triton's interpreter truncates where hardware
  rounds, and multiplies the bit patterns of bfloat16 as if they were integers.

Formats are named as in `kv8.formats.base`. Everything here computes what docs/numerics.md says.
"""

import triton
import triton.language as tl


@triton.jit
def clamp(values, LARGEST: tl.constexpr):
    """Return float32 ``values`` within ±LARGEST, infinities too; NaN stays."""
    values = tl.where(values > LARGEST, LARGEST, values)
    return tl.where(values < -LARGEST, -LARGEST, values)


@triton.jit
def encode_fp8(values, FORMAT: tl.constexpr, CASTS: tl.constexpr):
    """Return the FP8 codes of float32 ``values`` that are in range or NaN, to nearest even."""
    if CASTS == "hardware":
        if FORMAT == "fp8_e4m3":
            return values.to(tl.float8e4nv)
        else:
            return values.to(tl.float8e5)
    elif FORMAT == "fp8_e4m3":
        return _encode_bits(values, 20, 120, 0.015625, 16384.0)  # 2^-6, 2^14
    else:
        return _encode_bits(values, 21, 112, 0.00006103515625, 128.0)  # 2^-14, 2^7


@triton.jit
def _encode_bits(
    values,
    DROPPED: tl.constexpr,
    BIAS: tl.constexpr,
    SMALLEST_NORMAL: tl.constexpr,
    MAGIC: tl.constexpr,
):
    """Round by integers: DROPPED mantissa bits go, exponents move by BIAS.

    A float32 as large as MAGIC counts in the format's smallest steps, so adding it rounds what is
    below SMALLEST_NORMAL, and the sum's last bits are the code.
    """
    pattern = values.to(tl.uint32, bitcast=True)
    sign = (pattern >> 24) & 0x80
    magnitude = pattern & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    odd = (magnitude >> DROPPED) & 1
    half = (1 << (DROPPED - 1)) - 1
    normal = ((magnitude + half + odd) >> DROPPED) - (BIAS << (23 - DROPPED))
    lifted = size + MAGIC
    small = lifted.to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(size < SMALLEST_NORMAL, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def widen_codes(codes, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, CASTS: tl.constexpr):
    """Return the values of ``codes`` in COMPUTE, a type that holds all of them.

    FP8 goes through float16, which holds every value of both formats: on NVIDIA one instruction
    widens two codes.
    """
    if FORMAT == "fp8_e4m3" and CASTS != "hardware":
        pattern = codes.to(tl.uint16)
        magnitude = pattern & 0x7F
        # Exponents of float16 are 8 larger: as they stand, the bits mean a 256th of the value.
        shifted = ((pattern & 0x80) << 8) | (magnitude << 7)
        shifted = tl.where(magnitude == 0x7F, 0x7E00, shifted).to(tl.uint16)
        return (shifted.to(tl.float16, bitcast=True) * 256.0).to(COMPUTE)
    elif FORMAT == "fp8_e5m2" and CASTS != "hardware":
        shifted = (codes.to(tl.uint16) << 8).to(tl.uint16)
        return shifted.to(tl.float16, bitcast=True).to(COMPUTE)
    elif FORMAT == "fp8_e4m3" or FORMAT == "fp8_e5m2":
        return codes.to(tl.float16).to(COMPUTE)
    elif tl.float32 == COMPUTE:
        return to_float32(codes, CASTS)
    else:
        return codes.to(COMPUTE)


@triton.jit
def widen_pairs(pairs, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, CASTS: tl.constexpr):
    """Return the values of the lower and of the upper FP8 code of each of ``pairs``, 16-bit words.

    A tile of values meets the weights along the keys, but lies in memory along the dimensions.
    Matrix loads turn 16-bit words around, not bytes: as words of two dimensions they come out as
    the matrix unit wants them, and as bytes they would have to be fetched one by one.
    """
    if FORMAT == "fp8_e5m2":
        low = (pairs << 8).to(tl.float16, bitcast=True).to(COMPUTE)
        high = (pairs & 0xFF00).to(tl.uint16).to(tl.float16, bitcast=True).to(COMPUTE)
        return low, high
    elif CASTS == "hardware":
        # What follows, for two words (four codes) at a time: one instruction for the bytes of a
        # side to meet, and one for each side to widen.
        low, high = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 sides;
                .reg .b16 low, high;
                prmt.b32 sides, $2, 0, 0x3120;
                mov.b32 {low, high}, sides;
                cvt.rn.f16x2.e4m3x2 $0, low;
                cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            constraints="=r,=r,r",
            args=[pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
        return low.to(COMPUTE), high.to(COMPUTE)
    else:
        low = (pairs & 0xFF).to(tl.uint8)
        high = (pairs >> 8).to(tl.uint8)
        return widen_codes(low, FORMAT, COMPUTE, CASTS), widen_codes(high, FORMAT, COMPUTE, CASTS)


@triton.jit
def to_float32(values, CASTS: tl.constexpr):
    """Return float32, bfloat16 or float16 ``values`` in float32."""
    if values.dtype == tl.bfloat16 and CASTS == "interpreter":
        pattern = values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return pattern.to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def round_to(values, DTYPE: tl.constexpr, CASTS: tl.constexpr):
    """Return float32 ``values`` rounded to float32, bfloat16 or float16, to nearest even."""
    if tl.bfloat16 == DTYPE and CASTS == "interpreter":
        pattern = values.to(tl.uint32, bitcast=True)
        rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        rounded = tl.where(values != values, 0x7FC0, rounded).to(tl.uint16)
        return rounded.to(tl.bfloat16, bitcast=True)
    else:
        return values.to(DTYPE)


@triton.jit
def multiply(a, b, CASTS: tl.constexpr):
    """Return float32 ``a @ b`` of two tiles of one type, float32 ones without TF32."""
    if a.dtype == tl.bfloat16 and CASTS == "interpreter":
        a = to_float32(a, CASTS)
        b = to_float32(b, CASTS)
    return tl.dot(a, b, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def multiply_add(a, b, total, CASTS: tl.constexpr):
    """Return float32 ``total + a @ b``, as `multiply`."""
    if a.dtype == tl.bfloat16 and CASTS == "interpreter":
        a = to_float32(a, CASTS)
        b = to_float32(b, CASTS)
    return tl.dot(a, b, acc=total, input_precision="ieee", out_dtype=tl.float32)
