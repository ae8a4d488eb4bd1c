"""What form an output must have: a JSON schema, a regular expression, a choice, or a grammar.

Names and meanings are vLLM's. Data only; `kv8.engine.grammars` makes token masks of it.
"""

import json as json_module
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kv8.errors import RequestError

_FORMS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an output; exactly one is given. It never constrains what an output *means*.

    Attributes:
        json: a JSON schema, as a dictionary or as text; kept as text.
        json_object: whether the output must be a JSON object, whatever is in it.
        regex: an expression that the whole output matches, without look-around; ``\\d``, ``\\w``
            and ``\\s`` are ASCII.
        choice: texts of which the output is one.
        grammar: a grammar in llguidance's variant of Lark.

    Raises:
        RequestError: none is given, or several, or one is of the wrong type. Whether the schema or
            grammar itself makes sense is decided where it is compiled.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise RequestError(f"json_object must be True or False, got {self.json_object!r:.80}.")
        values = {form: getattr(self, form) for form in _FORMS} | {
            "json_object": self.json_object or None
        }
        given = [form for form, value in values.items() if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(
                f"structured_outputs takes exactly one of {', '.join(_FORMS)}; got {found}."
            )
        # A schema or list that its owner changes later must not change the request.
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for form in ("regex", "grammar"):
            text = getattr(self, form)
            if text is not None:
                _require_text(form, text)


def _schema_text(schema: Any) -> str:
    if isinstance(schema, Mapping):
        try:
            schema = json_module.dumps(schema, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"json is no JSON schema: {error}.") from None
    _require_text("json", schema)
    text: str = schema
    return text


def _choices(choice: Any) -> tuple[str, ...]:
    if not isinstance(choice, list | tuple) or not choice:
        raise RequestError(f"choice must be a list of at least one text, got {choice!r:.80}.")
    for text in choice:
        _require_text("choice", text)
    return tuple(choice)


def _require_text(form: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{form} must be text that is not empty, got {text!r:.80}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{form} holds what is no text in UTF-8: {error}.") from None
