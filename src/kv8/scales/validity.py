"""Which numbers and shapes can be scales at all: the one set of rules for every source."""

import math
from collections.abc import Sequence
from typing import Final, Literal

from kv8.scales.scale import Side

Strategy = Literal["tensor", "attn_head"]

# A scale is the largest magnitude a tensor had, divided by 448. No model's keys, values or queries
# reach 2**58; the smallest scale a producer writes on purpose is AutoFP8's 2.2e-15 for an all-zero
# tensor. What lies outside is memory that nobody wrote to: the 3e-18 and 1e38 of llm-compressor
# 0.14.0's q scales, and every denormal.
SMALLEST_SCALE: Final = 2.0**-50
LARGEST_SCALE: Final = 2.0**50
_SMALLEST_NORMAL: Final = 2.0**-126

ALLOWED_VALUES: Final = f"finite numbers from {SMALLEST_SCALE:.1e} to {LARGEST_SCALE:.1e}"


def value_fault(value: float) -> str | None:
    """Return why ``value`` cannot be a scale, or `None` if it can."""
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite"
    if value == 0:
        return "zero"
    if value < 0:
        return "negative"
    if value < _SMALLEST_NORMAL:
        return "denormal"
    if value < SMALLEST_SCALE:
        return "too small to be a scale"
    if value > LARGEST_SCALE:
        return "too large to be a scale"
    return None


def values_fault(values: Sequence[float]) -> str | None:
    """Return what is wrong with the first bad value of ``values``, or `None` if all are good."""
    for index, value in enumerate(values):
        fault = value_fault(value)
        if fault:
            head = f" for head {index}" if len(values) > 1 else ""
            return f"value {value!r}{head} is {fault}; allowed are {ALLOWED_VALUES}"
    return None


def shape_fault(
    shape: Sequence[int], side: Side, num_heads: int, strategy: Strategy | None
) -> str | None:
    """Return why a tensor of ``shape`` cannot hold the scales of ``side``, or `None` if it can.

    Args:
        shape: as stored; (), (1,), (heads,) and (heads, 1, 1) all occur.
        side: q, k or v.
        num_heads: H for q, K for k and v.
        strategy: what the source says the scale is per; `None` when it does not say, so that one
            value and one a head are both fine.
    """
    count = math.prod(shape)
    heads = "query heads" if side == "q" else "kv heads"
    if strategy == "tensor":
        allowed, expected = {1}, "1 value, since the strategy is 'tensor'"
    elif strategy == "attn_head":
        allowed = {num_heads}
        expected = f"{num_heads} values ({heads}), since the strategy is 'attn_head'"
    else:
        allowed, expected = {1, num_heads}, f"1 value, or {num_heads} ({heads})"
    if count in allowed:
        return None
    return f"shape {list(shape)} does not fit; expected {expected}"
