"""Whether everything in a body that should be text is text."""

import json
from typing import Any


def require_text(body: Any) -> None:
    r"""Refuse lone surrogates, which JSON can spell (``"\ud800"``) and UTF-8 cannot.

    Raises:
        ValueError: there is one; says where.
    """
    try:
        # Nearly every body passes, and this tells so faster than any loop in Python.
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        _find_what_is_none(body)


def _find_what_is_none(body: Any) -> None:
    rest: list[tuple[str, Any]] = [("", body)]
    while rest:
        place, value = rest.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                _require(key, f"A name in {place or 'the body'}")
                rest.append((f"{place}.{key}" if place else key, inner))
        elif isinstance(value, list):
            rest.extend((f"{place}[{number}]", inner) for number, inner in enumerate(value))
        elif isinstance(value, str):
            _require(value, place)


def _require(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} holds a lone surrogate at character {error.start}, which is no text."
        ) from None
