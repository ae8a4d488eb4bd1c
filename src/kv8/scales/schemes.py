"""Which declared cache schemes kv8 serves: an allow-list of whole schemes, refused by field.

A scheme is accepted only if every field that changes what a stored code means has a value listed
here; one wrong field is enough to refuse it, and the refusal names the field, its value and what
is supported.
"""

from collections.abc import Mapping
from typing import Any, Final, cast

from kv8.scales.validity import Strategy

SUPPORTED: Final = (
    "kv8 serves static FP8 caches: type 'float', num_bits 8, symmetric, dynamic false, strategy "
    "'tensor' or 'attn_head'"
)

# Field, what compressed-tensors takes it to be when it is missing or null, and what kv8 serves.
_FIELDS: Final[tuple[tuple[str, Any, tuple[Any, ...]], ...]] = (
    ("type", "int", ("float",)),
    ("num_bits", 8, (8,)),
    ("strategy", "tensor", ("tensor", "attn_head")),
    ("dynamic", False, (False,)),
    ("symmetric", True, (True,)),
    ("group_size", None, (None,)),
    ("block_structure", None, (None,)),
    ("actorder", None, (None, False)),
)
_STATIC_WORDS: Final = ("static", "fp8", "fp8_e4m3")
_QUARK_FIELDS: Final[tuple[tuple[str, Any, tuple[Any, ...]], ...]] = (
    ("dtype", None, ("fp8_e4m3",)),
    ("qscheme", None, ("per_tensor",)),
    ("is_dynamic", False, (False,)),
    ("symmetric", True, (True,)),
)


def dict_refusal(scheme: Mapping[str, Any], where: str) -> str | None:
    """Return why a compressed-tensors or ModelOpt scheme is not served, or `None` if it is."""
    return _refusal(scheme, _FIELDS, where, SUPPORTED)


def quark_refusal(spec: Mapping[str, Any], where: str) -> str | None:
    """Return why a Quark output spec of a k or v projection is not served, or `None` if it is."""
    supported = "kv8 serves dtype 'fp8_e4m3', qscheme 'per_tensor', symmetric, is_dynamic false"
    return _refusal(spec, _QUARK_FIELDS, where, supported)


def word_refusal(word: str, where: str) -> str | None:
    """Return why a scheme given as one word is not served, or `None` if it is."""
    if word.lower() in _STATIC_WORDS:
        return None
    known = ", ".join(repr(known) for known in _STATIC_WORDS)
    return f"{where} is {word!r}; kv8 serves {known} (8-bit float with static scales)"


def strategy_of(scheme: Mapping[str, Any]) -> Strategy:
    """Return what an accepted scheme's scales are per."""
    return cast(Strategy, scheme.get("strategy") or "tensor")


def _refusal(
    found: Mapping[str, Any],
    fields: tuple[tuple[str, Any, tuple[Any, ...]], ...],
    where: str,
    supported: str,
) -> str | None:
    wrong: list[str] = []
    for name, default, allowed in fields:
        value = found.get(name)
        effective = default if value is None else value
        # Equality alone would let 1 pass for True and True for 1.
        if any(effective == good and type(effective) is type(good) for good in allowed):
            continue
        absent = " (missing, which means this)" if value is None else ""
        wrong.append(f"{where}.{name} is {effective!r}{absent}")
    return f"{', '.join(wrong)}; {supported}" if wrong else None
