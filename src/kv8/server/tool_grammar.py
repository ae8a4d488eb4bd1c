"""A grammar for answers that call tools: the model's own way of calling, arguments by schema."""

import json
import re
from collections.abc import Mapping, Sequence

from kv8.engine.grammars import JSON_OPTIONS
from kv8.server.protocol.tools import FunctionDefinition
from kv8.server.tool_format import ToolFormat

# Calls stand in a line, with a blank after a comma or colon at most.
_ARGUMENT_OPTIONS = JSON_OPTIONS | {"whitespace_pattern": " "}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(
    tools: Sequence[FunctionDefinition],
    style: ToolFormat,
    added_tokens: Mapping[str, int],
    *,
    parallel: bool,
    must_call: bool,
) -> str:
    """Return a grammar, in llguidance's Lark, of answers that call ``tools``.

    Args:
        tools: the functions that may be called; at least one.
        style: how the model calls.
        added_tokens: numbers of tokens such as ``<tool_call>``, which are no text to a grammar.
        parallel: whether there may be several calls.
        must_call: whether the answer is calls and nothing else. Otherwise it is any text, in which
            calls may follow; ``style.begin`` must then say where one begins.
    """
    between = style.between if parallel else None
    more = "" if between is None else f"({_literal(between, added_tokens)} call)*"
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    rules += [_call_rule(number, tool, style) for number, tool in enumerate(tools)]
    end = _literal(style.end, added_tokens)
    if must_call:
        start = f"start: {_literal(style.begin, added_tokens)} call {more} {end}"
        return "\n".join([start, *rules])
    # A text runs on until the marker turns up in it: lazily, or the text would swallow the marker.
    marker, *rest = _pieces(style.begin.lstrip(), added_tokens)
    rest_literal = _literal("".join(rest), added_tokens)
    if marker in added_tokens:
        opening = f"opening: TEXT {_literal(marker, added_tokens)}"
    else:
        stripped = marker.rstrip()
        opening = f"opening[lazy]: TEXT {json.dumps(stripped, ensure_ascii=False)}"
        rest_literal = f"{_literal(marker[len(stripped) :], added_tokens)} {rest_literal}"
    return "\n".join(
        [
            # Text after the only call could hold another one.
            "start: calls* TEXT" if parallel else "start: calls | TEXT",
            f"calls: opening {rest_literal} call {more} {end}",
            opening,
            "TEXT: /(.|\\n)*/",
            *rules,
        ]
    )


def _call_rule(number: int, tool: FunctionDefinition, style: ToolFormat) -> str:
    """Return the rule of one tool's call, which is written as the template writes it."""
    schema = _NO_ARGUMENTS if tool.parameters is None else tool.parameters
    # Each schema is a %json of its own, so that its references to itself go on to work.
    bounded = {**schema, "x-guidance": _ARGUMENT_OPTIONS}
    head = f"{{{json.dumps(style.name_key)}: {json.dumps(tool.name)}, "
    head += f"{json.dumps(style.arguments_key)}: "
    return f'call_{number}: {json.dumps(head)} %json {json.dumps(bounded)} "}}"'


def _literal(text: str, added_tokens: Mapping[str, int]) -> str:
    """Return ``text`` as Lark has it: strings, and added tokens by number."""
    return " ".join(
        f"<[{added_tokens[piece]}]>"
        if piece in added_tokens
        else json.dumps(piece, ensure_ascii=False)
        for piece in _pieces(text, added_tokens)
    )


def _pieces(text: str, added_tokens: Mapping[str, int]) -> list[str]:
    """Cut ``text`` at added tokens, which are pieces themselves."""
    if not added_tokens:
        return [text] if text else []
    longest_first = sorted(added_tokens, key=len, reverse=True)
    pattern = "(" + "|".join(map(re.escape, longest_first)) + ")"
    return [piece for piece in re.split(pattern, text) if piece]
