"""How a model writes tool calls, read off its own chat template.

A template that knows tools can write a past call into a conversation. A made-up one is given to it,
and where its name and arguments turn up says how this model calls: what stands before, between and
after, and what the JSON's two keys are called. So there is no list of models and parsers to keep.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kv8.errors import RequestError

_QUESTION, _ANSWER, _RESULT = "kv8 asks", "kv8 answers", "kv8 has looked"
_NAMES = ("kv8_first", "kv8_second")
_ARGUMENTS = {"kv8_key": "kv8_value"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAMES[0],
        "description": "kv8 describes",
        "parameters": {"type": "object", "properties": {"kv8_key": {"type": "string"}}},
    },
}
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolFormat:
    """A model's way of calling: ``begin {"name": ..., "arguments": ...} end``.

    Attributes:
        begin: what stands before a call; may be empty.
        end: what stands after the last one; may be empty.
        between: what stands between two; `None` if the template writes one call only.
        name_key: the JSON object's key for the function.
        arguments_key: its key for the arguments.
    """

    begin: str
    end: str
    between: str | None
    name_key: str
    arguments_key: str


@dataclass(frozen=True)
class _Found:
    """A call in a rendered conversation: the JSON's place and its keys."""

    start: int
    stop: int
    name_key: str
    arguments_key: str


def find_tool_format(tokenizer: Any, template: str | None = None) -> ToolFormat:
    """Return how the model of ``tokenizer`` calls tools.

    Args:
        tokenizer: a transformers tokenizer.
        template: a Jinja template in place of its own.

    Raises:
        RequestError: its template has no tools, or writes calls in a way kv8 cannot read.
    """
    writer = _Writer(tokenizer, template)
    if _NAMES[0] not in writer.text(()):
        raise RequestError(
            "tools cannot be used with this model: its chat template leaves them out. Use a model "
            "trained to call tools, or give a template that writes them with --chat-template."
        )
    if _RESULT not in writer.text(_NAMES[:1], result=_RESULT):
        raise RequestError(
            "tools cannot be used with this model: its chat template leaves out what they answer."
        )
    told = writer.text((), answer=_ANSWER)
    head, _, closing = told.partition(_ANSWER)
    one = writer.text(_NAMES[:1])
    heads = (head, head.rstrip(), writer.text(()))
    start = next((len(head) for head in heads if one.startswith(head)), None)
    found = None if start is None else _find_call(one, _NAMES[0], start)
    if start is None or found is None or not one.endswith(closing):
        raise RequestError(
            "tools cannot be used with this model: its chat template does not write a call as a "
            "JSON object with a name and arguments, which is the only way kv8 can read."
        )
    return ToolFormat(
        begin=one[start : found.start],
        end=one[found.stop : len(one) - len(closing)],
        between=_between(writer, start),
        name_key=found.name_key,
        arguments_key=found.arguments_key,
    )


def _between(writer: "_Writer", start: int) -> str | None:
    try:
        two = writer.text(_NAMES)
    except RequestError:  # some templates know one call a message only
        return None
    first = _find_call(two, _NAMES[0], start)
    second = None if first is None else _find_call(two, _NAMES[1], first.stop)
    return None if first is None or second is None else two[first.stop : second.start]


class _Writer:
    """Renders a short conversation."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def text(
        self, called: Sequence[str], *, answer: str | None = None, result: str | None = None
    ) -> str:
        """Return the conversation, answered with calls (with or without a result), or a text."""
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": _QUESTION}]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        elif called:
            messages.append(_message(called))
        if result is not None:
            call_id = _message(called)["tool_calls"][0]["id"]
            messages.append(
                {"role": "tool", "name": called[0], "tool_call_id": call_id, "content": result}
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=[_TOOL],
                tokenize=False,
                chat_template=self._template,
                add_generation_prompt=len(messages) == 1,
            )
        except Exception as error:
            raise RequestError(
                f"tools cannot be used with this model: its chat template fails on them ({error})."
            ) from error
        return text


def _message(called: Sequence[str]) -> dict[str, Any]:
    calls = [
        # Some templates insist on names of nine letters and digits.
        {
            "id": f"kv8call{number:02}",
            "type": "function",
            "function": {"name": name, "arguments": _ARGUMENTS},
        }
        for number, name in enumerate(called)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _find_call(text: str, name: str, start: int) -> _Found | None:
    """Return the outermost JSON object beyond ``start`` that is a call of ``name``."""
    limit = text.find(name, start)
    while limit >= 0 and 0 <= (start := text.find("{", start)) < limit:
        try:
            value, stop = _DECODER.raw_decode(text, start)
        except ValueError:
            value, stop = None, start
        if isinstance(value, dict):
            names = [key for key, entry in value.items() if entry == name]
            arguments = [key for key, entry in value.items() if entry == _ARGUMENTS]
            if names and arguments:
                return _Found(start, stop, names[0], arguments[0])
        start += 1
    return None
