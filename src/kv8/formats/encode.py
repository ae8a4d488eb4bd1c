"""Values to stored codes and back: the one rule every store and every attention follows.

``code = round(clamp(value / scale, -finite_max, finite_max))`` and ``value = code * scale``, in
float32, rounding to nearest even. docs/numerics.md states the rule, its errors and its tests.
"""

from typing import Final

import torch
from torch.nn.functional import pad

from kv8.formats.base import KVFormat

# Entries of a count, in order; see `encode_counting`.
COUNTED: Final = ("stored", "saturated", "underflowed", "nan")

# Float32 value of each code of e4m3, in order.
_E4M3_VALUES: Final = (
    torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).to(torch.float32)
)

_BITS_DTYPE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def torch_dtype(kv_format: KVFormat) -> torch.dtype:
    """Return the torch dtype of the format's codes."""
    dtype = getattr(torch, kv_format.torch_dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def bits(codes: torch.Tensor) -> torch.Tensor:
    """Return ``codes`` viewed as integers of their size, any shape and strides.

    Codes are moved and compared as integers, so that no copy converts a number.
    """
    return codes.view(_BITS_DTYPE[codes.element_size()])


def encode(
    values: torch.Tensor, scale: torch.Tensor | float | None, kv_format: KVFormat
) -> torch.Tensor:
    """Return ``values`` as codes of a format, same shape, in the format's torch dtype.

    Args:
        values: bfloat16, float16 or float32. NaN becomes the format's NaN, an infinity the
            largest finite code of its sign. Formats that are not quantized keep, infinities
            included, what they hold exactly: their own dtype, and in float32 everything.
        scale: float32, broadcast against ``values``; finite and positive. `None` for no scale,
            the only choice for a format that is not quantized.
        kv_format: what to store in.
    """
    return _round(_divide(values, scale, kv_format), kv_format)


def encode_counting(
    values: torch.Tensor, scale: torch.Tensor | float | None, kv_format: KVFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of `encode`, and int64 [4] on the same device: the entries of `COUNTED`.

    Saturated: beyond the format's finite range after scaling, infinities included. Underflowed:
    not zero, but stored as zero.
    """
    scaled = _divide(values, scale, kv_format)
    codes = _round(scaled, kv_format)
    magnitude = scaled.abs()
    saturated = magnitude > kv_format.finite_max
    # Half the smallest code lies between it and zero; the tie goes to the even one, zero.
    underflowed = (magnitude <= kv_format.smallest / 2) & (values != 0)
    events = [saturated, underflowed, scaled.isnan()]
    if scaled.dtype == codes.dtype:  # held exactly: nothing can be lost
        events[:2] = [torch.zeros_like(saturated)] * 2
    counts = torch.stack([event.count_nonzero() for event in events])
    return codes, pad(counts, (1, 0), value=values.numel())


def decode(
    codes: torch.Tensor, scale: torch.Tensor | float | None, kv_format: KVFormat
) -> torch.Tensor:
    """Return the float32 values of ``codes``, same shape; exact when ``scale`` is `None`.

    Args:
        codes: in the format's torch dtype.
        scale: as in `encode`.
        kv_format: what the codes are in.
    """
    assert codes.dtype == torch_dtype(kv_format), f"{codes.dtype} codes are not {kv_format.name}"
    values = _widen(codes)
    return values if scale is None else values * scale


def _divide(
    values: torch.Tensor, scale: torch.Tensor | float | None, kv_format: KVFormat
) -> torch.Tensor:
    """Return ``values / scale`` in float32, or ``values`` if they are codes already."""
    if not kv_format.quantized:
        assert scale is None, f"{kv_format.name} takes no scale"
        if values.dtype == torch_dtype(kv_format):
            return values
    values = values.to(torch.float32)
    return values if scale is None else values / scale


def _round(scaled: torch.Tensor, kv_format: KVFormat) -> torch.Tensor:
    dtype = torch_dtype(kv_format)
    if scaled.dtype == dtype:
        return scaled
    # What a cast does beyond its range differs between formats, devices and torch versions, so
    # none gets to see such a value. clamp() passes NaN on, and every cast keeps it.
    return scaled.clamp(-kv_format.finite_max, kv_format.finite_max).to(dtype)


def _widen(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype == torch.float8_e4m3fn and codes.device.type == "cpu":
        # A fifth of the time torch's own conversion takes on a CPU.
        index = bits(codes).reshape(-1).to(torch.int32)
        return _E4M3_VALUES.index_select(0, index).view(codes.shape)
    return codes.to(torch.float32)
