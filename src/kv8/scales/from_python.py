"""Scales given as a Python mapping: ``{layer: {"k": 0.05, "v": [0.01, 0.02]}}``."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kv8.errors import ScaleError
from kv8.geometry import ModelGeometry
from kv8.scales.collect import by_layer, check_layer
from kv8.scales.scale import SIDES, ModelScales, Origin, OriginKind, Scale, Side
from kv8.scales.validity import shape_fault, values_fault


def scales_from_mapping(mapping: Mapping[Any, Any], geometry: ModelGeometry) -> ModelScales:
    """Return the scales in ``mapping``, checked as strictly as a checkpoint's.

    Args:
        mapping: by layer number, a mapping from ``"q"``, ``"k"`` or ``"v"`` to one number, or to
            one a head (a list, a tuple, an array or a tensor).
        geometry: the model they are for.

    Raises:
        ScaleError: a key is no layer with a use for it, or a value is no scale; names the entry.
    """
    if not isinstance(mapping, Mapping) or not mapping:
        raise ScaleError(
            f'kv_scales must map layer numbers to scales, like {{0: {{"k": 0.05, "v": 0.02}}}}, '
            f"got {mapping!r}."
        )
    scales: dict[tuple[int, Side], Scale] = {}
    for key, sides in mapping.items():
        number = _layer_number(key)
        if not isinstance(sides, Mapping) or not sides or not set(sides) <= set(SIDES):
            raise ScaleError(
                f'kv_scales[{key!r}] must map some of "q", "k" and "v" to scales, got {sides!r}.'
            )
        check_layer(number, cast(Sequence[Side], tuple(sides)), geometry, f"kv_scales[{key!r}]")
        layer = geometry.layer(number)
        for side, value in sides.items():
            if (number, side) in scales:
                raise ScaleError(f"kv_scales gives the {side} scale of layer {number} twice.")
            heads = layer.num_heads if side == "q" else layer.num_kv_heads
            scales[number, side] = _scale(f"kv_scales[{key!r}][{side!r}]", value, side, heads)
    return ModelScales(by_layer(scales))


def _layer_number(key: Any) -> int:
    """JSON and command lines only have text keys, so digits count as numbers."""
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if isinstance(key, str) and key.isascii() and key.isdecimal():
        return int(key)
    raise ScaleError(f"kv_scales has the key {key!r}; keys are layer numbers.")


def _scale(what: str, value: Any, side: Side, heads: int) -> Scale:
    plain = value.flatten().tolist() if hasattr(value, "flatten") else value
    numbers = list(plain) if isinstance(plain, Sequence) and not isinstance(plain, str) else [plain]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        raise ScaleError(f"{what} must be a number or a flat list of numbers, got {value!r}.")
    values = tuple(_float32(number) for number in numbers)
    fault = shape_fault((len(values),), side, heads, None) or values_fault(values)
    if fault:
        raise ScaleError(f"{what}: {fault}.")
    return Scale(values, Origin(OriginKind.PYTHON, what))


def _float32(number: float) -> float:
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except (OverflowError, struct.error):  # the latter for integers beyond float64
        return float("inf") if number > 0 else float("-inf")
    return rounded
