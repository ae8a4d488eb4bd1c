"""Tools of a request: told to the template, forced by a grammar, read from the answer."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.text_tokenizers import byte_level
from tests.tool_templates import BARE, WITHOUT_TOOLS, WRAPPED

from kv8.server.protocol.chat import ChatCompletionRequest
from kv8.server.protocol.errors import ApiError
from kv8.server.texts import Texts
from kv8.server.tools import ToolUse, template_messages, tool_use

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "See.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
STRICT = {"type": "function", "function": {"name": "tell", "strict": True}}
ASKED = [{"role": "user", "content": "How is it?"}]


def use(template: str = WRAPPED, **fields: Any) -> ToolUse:
    body = ChatCompletionRequest.model_validate({"messages": ASKED} | fields)
    texts = Texts(byte_level(), chat_template=template)
    try:
        return asyncio.run(tool_use(body, SimpleNamespace(texts=texts)))  # type: ignore[arg-type]
    finally:
        texts.close()


def grammar(found: ToolUse) -> str | None:
    form = found.sampling_options.get("structured_outputs")
    return None if form is None else form.grammar


def test_without_tools_nothing_changes_even_for_models_that_have_none() -> None:
    found = use(WITHOUT_TOOLS)
    assert found == ToolUse()
    assert found.reader() is None


def test_the_template_is_told_of_tools_as_they_were_given() -> None:
    found = use(tools=[LOOK, STRICT])
    assert found.template_options == {"tools": [LOOK, STRICT]}
    reader = found.reader()
    assert reader is not None
    [delta] = reader.push('<tool_call>{"name": "look", "arguments": {"where": "up"}}</tool_call>')
    assert delta.tool_calls[0].function.name == "look"


def test_any_text_will_do_where_nothing_must_hold() -> None:
    assert grammar(use(tools=[LOOK])) is None
    assert grammar(use(tools=[LOOK], tool_choice="auto", parallel_tool_calls=True)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [LOOK, STRICT]},
        {"tools": [LOOK], "parallel_tool_calls": False},
        {"tools": [LOOK], "tool_choice": "required"},
        {"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    ],
)
def test_what_must_hold_is_in_a_grammar(fields: dict[str, Any]) -> None:
    text = grammar(use(**fields))
    assert text is not None
    assert "look" in text


def test_only_the_chosen_function_can_be_called() -> None:
    choice = {"type": "function", "function": {"name": "tell"}}
    found = use(tools=[LOOK, STRICT], tool_choice=choice)
    assert found.names == {"tell"}
    assert "look" not in (grammar(found) or "")
    assert found.template_options == {"tools": [LOOK, STRICT]}


def test_what_must_hold_needs_to_know_where_a_call_begins() -> None:
    for fields in ({"tools": [STRICT]}, {"tools": [LOOK], "parallel_tool_calls": False}):
        with pytest.raises(ApiError, match="does not") as caught:
            use(BARE, **fields)
        assert caught.value.param == "tools"
    assert grammar(use(BARE, tools=[STRICT], tool_choice="required")) is not None


def test_markers_that_are_special_tokens_are_kept_in_the_text() -> None:
    special = byte_level().bos_token
    found = use(WRAPPED.replace("<tool_call>", special), tools=[LOOK], tool_choice="required")
    assert found.sampling_options["skip_special_tokens"] is False
    assert f"<[{byte_level().bos_token_id}]>" in (grammar(found) or "")
    assert "skip_special_tokens" not in use(tools=[LOOK]).sampling_options


def test_past_calls_reach_the_template_as_objects() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    empty = {"id": "b", "type": "function", "function": {"name": "g", "arguments": ""}}
    said = {"role": "assistant", "tool_calls": [call, empty]}
    body = ChatCompletionRequest.model_validate({"messages": [*ASKED, said]})
    plain = template_messages(body.messages)[1]
    arguments = [call["function"]["arguments"] for call in plain["tool_calls"]]
    assert arguments == [{"a": [1]}, {}]
    assert plain["content"] is None
