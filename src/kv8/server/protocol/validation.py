"""What was wrong with a body, told by field: pydantic's findings in OpenAI's words."""

from collections.abc import Mapping, Sequence
from typing import Any

from kv8.server.protocol.errors import ApiError, field_of

_MOST = 3  # findings told at once; a wrong type deep inside makes many
_LONGEST_VALUE = 60


def validation_error(findings: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Return the answer to a request whose body, query or path is not what the route takes.

    Args:
        findings: as `pydantic.ValidationError.errors` lists them, each place led by where it was
            looked for ("body", "query").
        body: what was sent, as far as it was JSON.
    """
    if any(finding["type"] == "json_invalid" for finding in findings):
        reason = findings[0].get("ctx", {}).get("error", "it cannot be read")
        return ApiError(400, f"The body is not JSON: {reason}.", code="invalid_json")
    told = dict.fromkeys(_sentence(finding, body) for finding in findings)
    more = f" And {len(told) - _MOST} more." if len(told) > _MOST else ""
    message = " ".join(list(told)[:_MOST]) + more
    fields = body if isinstance(body, dict) else {}
    param = spell_place(findings[0]["loc"], body) or field_of(message, fields)
    return ApiError(400, message, param=param)


def spell_place(place: Sequence[int | str], body: Any) -> str:
    """Return a place in a body as people write it: ``messages[0].content``.

    Names that pydantic adds, of alternatives in a union, are left out: they are not in the body.
    """
    source, *steps = place
    if source != "body":
        return ".".join(map(str, steps))
    spelled, here = "", body
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        if isinstance(step, int) and isinstance(here, list):
            spelled += f"[{step}]"
            here = here[step] if step < len(here) else None
        elif isinstance(step, str) and isinstance(here, dict) and (last or step in here):
            spelled += f".{step}" if spelled else step
            here = here.get(step)
    return spelled


def _sentence(finding: Mapping[str, Any], body: Any) -> str:
    place = spell_place(finding["loc"], body)
    kind, message = finding["type"], str(finding["msg"])
    if kind == "missing":
        return f"{place or 'The body'} is missing."
    if kind == "extra_forbidden":
        return f"{place} is not known here. Leave it out."
    if kind == "value_error":  # our own, complete sentences
        return message.removeprefix("Value error, ")
    value = repr(finding.get("input"))
    if len(value) > _LONGEST_VALUE:
        value = value[:_LONGEST_VALUE] + "..."
    lead = f"{place}: " if place else "The body: "
    return f"{lead}{message[:1].lower()}{message[1:]}, got {value}."
