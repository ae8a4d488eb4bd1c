"""FP8 as its definition reads: values from the bit layout, rounding by search. No torch, no floats.

An oracle for kv8.formats: exact rationals, computed from exponent and mantissa widths alone.
"""

import bisect
from fractions import Fraction
from functools import cache

# name: (exponent bits, mantissa bits, bias, magnitudes that are NaN, magnitudes that are infinite)
LAYOUTS = {
    "fp8_e4m3": (4, 3, 7, {0x7F}, set()),
    "fp8_e5m2": (5, 2, 15, {0x7D, 0x7E, 0x7F}, {0x7C}),
}


def magnitude_of(name: str, code: int) -> Fraction | None:
    """Return the magnitude of a code from 0 to 0x7F, `None` if it is NaN or infinite."""
    _, mantissa_bits, bias, nans, infinities = LAYOUTS[name]
    if code in nans or code in infinities:
        return None
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias)


def value_of(name: str, code: int) -> Fraction | None:
    """Return the value of a code from 0 to 255, `None` if it is NaN or infinite."""
    magnitude = magnitude_of(name, code & 0x7F)
    return None if magnitude is None else (-magnitude if code & 0x80 else magnitude)


@cache
def finite_magnitudes(name: str) -> tuple[Fraction, ...]:
    """Return the finite magnitudes in order; the index of each is its code."""
    magnitudes = (magnitude_of(name, code) for code in range(128))
    return tuple(m for m in magnitudes if m is not None)


def nearest_code(name: str, value: Fraction, *, negative: bool) -> int:
    """Return the code nearest to ``value``; of two, the even one; beyond the range, the largest."""
    table = finite_magnitudes(name)
    above = bisect.bisect_left(table, abs(value))
    if above == len(table):
        code = above - 1
    elif above == 0:
        code = 0
    else:
        low, high = abs(value) - table[above - 1], table[above] - abs(value)
        closer = above - 1 if low < high else above
        code = above - 1 + (above - 1) % 2 if low == high else closer
    return code | (0x80 if negative else 0)
