"""What was wrong with a body, told by field: pydantic's findings in OpenAI's words."""

import re
from collections.abc import Iterator, Mapping, Sequence
from reprlib import Repr
from typing import Any

from kv8.server.protocol.errors import ApiError, field_of

_MOST = 3  # findings told at once
_LONGEST_VALUE = 60
# Quotes what was sent without writing out all of it first.
_quote = Repr()
_quote.maxlist = _quote.maxdict = _quote.maxstring = _quote.maxlong = _quote.maxother = 80


def validation_error(findings: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Return the answer to a request whose body, query or path is not what the route takes.

    Args:
        findings: as `pydantic.ValidationError.errors` lists them, each place led by where it was
            looked for ("body", "query").
        body: what was sent; bytes if it was not sent as JSON.
    """
    if isinstance(body, bytes):  # the framework reads as JSON what is called so, and nothing else
        return ApiError(
            400,
            "The body was not sent as JSON. Send it so, with Content-Type: application/json.",
        )
    placed = [(_place(finding, body), finding) for finding in findings]
    told = list(dict.fromkeys(_sentence(place, finding) for place, finding in _deepest(placed)))
    message = " ".join(told[:_MOST])
    if len(told) > _MOST:
        message += f" And {len(told) - _MOST} more."
    fields = body if isinstance(body, dict) else {}
    return ApiError(400, message, param=_deepest(placed)[0][0] or field_of(message, fields))


_Placed = tuple[str, Mapping[str, Any]]


def _deepest(placed: Sequence[_Placed]) -> list[_Placed]:
    """Return what to tell: of findings inside one another the innermost.

    Where a field may be several things, each of them makes a finding; the alternative that got
    furthest is the one that was meant. A list is counted last, so one that is too long was meant.
    """
    if too_long := [one for one in placed if one[1]["type"] == "too_long"]:
        return too_long
    outer = {ancestor for place, _ in placed for ancestor in _ancestors(place)}
    return [(place, finding) for place, finding in placed if place not in outer]


def _ancestors(place: str) -> Iterator[str]:
    """Yield the places that ``place`` is inside of: of ``a[0].b``, ``a[0]`` and ``a``."""
    for border in re.finditer(r"[.\[]", place):
        if border.start():
            yield place[: border.start()]


def _place(finding: Mapping[str, Any], body: Any) -> str:
    place = spell_place(finding["loc"], body, missing=finding["type"] == "missing")
    if finding["type"].startswith("union_tag"):  # it is about the field that says which it is
        name = str(finding["ctx"]["discriminator"]).strip("'")
        return f"{place}.{name}" if place else name
    return place


def spell_place(place: Sequence[int | str], body: Any, *, missing: bool = False) -> str:
    """Return a place in a body as people write it: ``messages[0].content``.

    Names that pydantic adds, of alternatives in a union, are left out: they are not in the body.

    Args:
        place: pydantic's, led by where it was looked for.
        body: what was sent.
        missing: whether the last step is not in the body, because that is what is wrong.
    """
    source, *steps = place
    if source != "body":
        return ".".join(map(str, steps))
    spelled, here = "", body
    for number, step in enumerate(steps):
        expected = missing and number == len(steps) - 1
        if isinstance(step, int) and isinstance(here, list) and step < len(here):
            spelled += f"[{step}]"
            here = here[step]
        elif isinstance(step, str) and isinstance(here, dict) and (step in here or expected):
            spelled += f".{step}" if spelled else step
            here = here.get(step)
    return spelled


def _sentence(place: str, finding: Mapping[str, Any]) -> str:
    kind, message = finding["type"], str(finding["msg"])
    value = _quote.repr(finding.get("input"))
    if kind in ("missing", "union_tag_not_found"):
        return f"{place or 'The body'} is missing."
    if kind == "extra_forbidden":
        return f"{place} is not known here. Leave it out."
    if kind == "value_error":  # our own, complete sentences
        return message.removeprefix("Value error, ")
    if kind == "union_tag_invalid":
        context = finding["ctx"]
        message = f"allowed are {context['expected_tags']}"
        value = repr(context["tag"])
    if len(value) > _LONGEST_VALUE:
        value = value[:_LONGEST_VALUE] + "..."
    return f"{place or 'The body'}: {message[:1].lower()}{message[1:]}, got {value}."
