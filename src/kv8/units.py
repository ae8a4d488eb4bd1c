"""Byte sizes as people write them: ``"2GiB"`` to bytes and back."""

import re

from kv8.errors import RequestError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: int | str, *, option: str = "size") -> int:
    """Return ``size`` in bytes; accepts an integer or text such as ``"2GiB"`` or ``"1.5 GB"``.

    Raises:
        RequestError: the text is no size, or the size is not positive; names ``option``.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise RequestError(f"{option} must be a number of bytes or text like '2GiB', got {size!r}.")
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        unit = match.group(2).lower() if match else None
        if match is None or unit not in _UNITS:
            raise RequestError(
                f"{option}={size!r} is not a size. Write a number of bytes, or a number with a "
                f"unit: B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024)."
            )
        size = int(float(match.group(1)) * _UNITS[unit])
    if size <= 0:
        raise RequestError(f"{option} must be more than 0 bytes, got {size}.")
    return size


def format_bytes(num_bytes: int) -> str:
    """Return ``num_bytes`` for reading, in binary units: ``"1.50 GiB"``, ``"512 B"``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
