"""The skip list's little language: which layers an entry like ``0-3`` or ``sliding_window`` means.

An entry is a layer number (``0``, or ``-1`` counted from the last layer), a range (``0-3``, both
ends included), ``first:2`` or ``last:2`` (of the layers that store keys and values), or a layer
type. Entries may overlap, and several may stand in one string, with commas or spaces between.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from kv8.errors import LayerPlanError
from kv8.geometry import LayerGeometry, ModelGeometry
from kv8.scales.wording import layer_list

OPTION = "kv_cache_dtype_skip_layers"

_NUMBER = re.compile(r"[+-]?\d+")
_RANGE = re.compile(r"(\d+)-(\d+)")
_COUNT = re.compile(r"(first|last):(\d+)")


@dataclass(frozen=True)
class _Entry:
    """One entry and the layers it selects; ``named`` if it gives a layer by its own number."""

    text: str
    layers: tuple[LayerGeometry, ...]
    named: bool = False


def skipped_layers(geometry: ModelGeometry, skip: Sequence[str]) -> dict[int, str]:
    """Return the layers ``skip`` keeps in the model's dtype, each with the first entry that does.

    Only layers that store keys and values appear; a layer that reads another's KV follows it.

    Raises:
        LayerPlanError: an entry is unknown, out of range, or means no layer that stores keys and
            values; the message lists what is valid.
    """
    words = [word for text in skip for word in re.split(r"[,\s]+", text.strip()) if word]
    entries = [_parse(word, geometry) for word in words]
    chosen: dict[int, str] = {}
    for entry in entries:
        for layer in entry.layers:
            if layer.owns_kv:
                chosen.setdefault(layer.layer, entry.text)
    for entry in entries:
        _require_effect(entry, chosen)
    return chosen


def layer_types(geometry: ModelGeometry) -> dict[str, tuple[LayerGeometry, ...]]:
    """Return the layers each type name means; ``sliding_window`` is every layer with a window."""
    types: dict[str, tuple[LayerGeometry, ...]] = {}
    for layer in geometry.layers:
        types[layer.type] = (*types.get(layer.type, ()), layer)
    windowed = tuple(layer for layer in geometry.layers if layer.window is not None)
    if windowed:
        types.setdefault("sliding_window", windowed)
        types.setdefault("sliding_attention", windowed)
    return types


def _parse(word: str, geometry: ModelGeometry) -> _Entry:
    if _NUMBER.fullmatch(word):
        return _Entry(word, (_numbered(word, int(word), geometry),), named=True)
    if match := _RANGE.fullmatch(word):
        return _Entry(word, _between(word, int(match[1]), int(match[2]), geometry))
    if match := _COUNT.fullmatch(word):
        return _Entry(word, _counted(word, match[1], int(match[2]), geometry))
    types = layer_types(geometry)
    if word in types:
        return _Entry(word, types[word])
    close = get_close_matches(word, [*types, "first:1", "last:1"], n=1, cutoff=0.6)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise _refusal(word, f"is not known.{hint}", geometry)


def _numbered(word: str, number: int, geometry: ModelGeometry) -> LayerGeometry:
    last = geometry.layers[-1].layer
    wanted = number if number >= 0 and not word.startswith("-") else last + 1 + number
    for layer in geometry.layers:
        if layer.layer == wanted:
            return layer
    if 0 <= wanted <= last:
        raise _refusal(word, f"means layer {wanted}, which has no attention.", geometry)
    raise _refusal(word, f"is out of range: the last layer with attention is {last}.", geometry)


def _between(word: str, low: int, high: int, geometry: ModelGeometry) -> tuple[LayerGeometry, ...]:
    last = geometry.layers[-1].layer
    if low > high:
        raise _refusal(word, f"is empty: write {high}-{low}.", geometry)
    if high > last:
        raise _refusal(word, f"is out of range: the last layer with attention is {last}.", geometry)
    found = tuple(layer for layer in geometry.layers if low <= layer.layer <= high)
    if not found:
        raise _refusal(word, "means only layers without attention.", geometry)
    return found


def _counted(word: str, end: str, count: int, geometry: ModelGeometry) -> tuple[LayerGeometry, ...]:
    owners = geometry.kv_layers
    if not 1 <= count <= len(owners):
        raise _refusal(word, f"must count from 1 to {len(owners)}.", geometry)
    return owners[:count] if end == "first" else owners[-count:]


def _require_effect(entry: _Entry, chosen: dict[int, str]) -> None:
    """Refuse an entry that selects a layer of shared KV without the layer that stores it."""
    for layer in entry.layers:
        if layer.owns_kv or (layer.kv_source in chosen and not entry.named):
            continue
        raise LayerPlanError(
            f"{OPTION}: {entry.text!r} selects layer {layer.layer}, which stores no keys and "
            f"values: it reads those of layer {layer.kv_source}. Name layer {layer.kv_source}; "
            f"layer {layer.layer} follows it."
        )


def _refusal(word: str, fault: str, geometry: ModelGeometry) -> LayerPlanError:
    owners = geometry.kv_layers
    types = ", ".join(layer_types(geometry))
    return LayerPlanError(
        f"{OPTION}: {word!r} {fault} Valid for {geometry.architecture}: "
        f"{layer_list(layer.layer for layer in owners)} (also negative: -1 is the last), ranges "
        f"like {owners[0].layer}-{owners[-1].layer}, first:N and last:N up to {len(owners)}, and "
        f"the types {types}."
    )
