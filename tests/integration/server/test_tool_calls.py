"""Tool calls over HTTP, by a model that knows nothing: what must be called is called, in form."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError
from tests.served import Served, serving
from tests.tiny_models import TinyModel
from tests.tool_templates import BARE, LISTED, WRAPPED

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look out of the window.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Seoul", "London"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "How is it?"}]
STYLES = {"wrapped": WRAPPED, "listed": LISTED, "bare": BARE}


@pytest.fixture(scope="module", params=STYLES)
def served(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory, request: Any
) -> Iterator[Served]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(STYLES[request.param])
    with serving(
        tiny_model(max_position_embeddings=2048),
        chat_template=str(template),
        kv_cache_memory="4MiB",
    ) as server:
        yield server


@pytest.fixture(scope="module")
def without_tools(tiny_model: TinyModel) -> Iterator[Served]:
    with serving(tiny_model()) as server:
        yield server


def chat(served: Served, **fields: Any) -> Any:
    fields = {"messages": MESSAGES, "tools": [WEATHER, CLOCK], "temperature": 0.0} | fields
    fields = {"max_completion_tokens": 160} | fields
    model = served.state.model_name
    return served.openai().chat.completions.create(model=model, **fields)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_the_one_function_that_must_be_called_is(served: Served) -> None:
    [choice] = chat(served, tool_choice=named("get_weather")).choices
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Seoul", "London")
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [choice] = chat(served, tool_choice=named("get_time")).choices
    assert [call.function.arguments for call in choice.message.tool_calls] == ["{}"]


def test_something_that_must_be_called_is(served: Served) -> None:
    answer = chat(
        served, tool_choice="required", parallel_tool_calls=False, n=4, temperature=1.5, seed=1
    )
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 4
    for choice in answer.choices:
        [call] = choice.message.tool_calls
        assert call.function.name in ("get_weather", "get_time")


def test_streamed_calls_are_the_same_calls(served: Served) -> None:
    fields = {"tool_choice": named("get_weather"), "seed": 3, "temperature": 1.0}
    [whole] = chat(served, **fields).choices
    calls, content, reasons = [], "", []
    for chunk in chat(served, stream=True, **fields):
        [choice] = chunk.choices
        calls += choice.delta.tool_calls or []
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
    assert [call.index for call in calls] == [0]
    function = whole.message.tool_calls[0].function
    assert calls[0].function.model_dump() == function.model_dump()
    assert content == ""
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


def test_a_call_and_its_result_can_be_sent_back(served: Served) -> None:
    [choice] = chat(served, tool_choice=named("get_weather")).choices
    [call] = choice.message.tool_calls
    said = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    longer = chat(served, messages=[*MESSAGES, said, result], max_completion_tokens=4)
    shorter = chat(served, max_completion_tokens=4)
    # The call and the result are read: the byte tokenizer counts every letter of theirs.
    added = longer.usage.prompt_tokens - shorter.usage.prompt_tokens
    assert added > len(call.function.arguments) + len("It rains.")


def test_what_may_be_called_need_not_be(served: Served) -> None:
    [choice] = chat(served, max_completion_tokens=12).choices
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")


def test_tools_not_to_be_called_are_not_told_of(served: Served) -> None:
    none = chat(served, tool_choice="none", max_completion_tokens=4)
    without = chat(served, tools=[], max_completion_tokens=4)
    told = chat(served, max_completion_tokens=4)
    assert none.usage.prompt_tokens == without.usage.prompt_tokens < told.usage.prompt_tokens
    assert none.choices[0].message == without.choices[0].message


def test_a_call_cut_off_is_no_call(served: Served) -> None:
    [choice] = chat(served, tool_choice=named("get_weather"), max_completion_tokens=20).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert len(choice.message.content) > 10


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "only with tools"),
        ({"tools": [], "parallel_tool_calls": True}, "parallel_tool_calls", "only with tools"),
        ({"tool_choice": named("fly")}, "tool_choice", "not among tools: get_weather, get_time"),
        ({"tool_choice": "sometimes"}, "tool_choice", ""),
        ({"tools": [CLOCK, CLOCK]}, "tools", "get_time more than once"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]", ""),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]", "pattern"),
        ({"response_format": {"type": "json_object"}}, "tools", "response_format"),
    ],
)
def test_fields_that_make_no_sense_are_refused_by_name(
    served: Served, fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(served, extra_body=fields)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert said in caught.value.message


def test_a_schema_nobody_can_follow_is_refused_when_it_must_be(served: Served) -> None:
    odd = {"name": "odd", "parameters": {"type": "object", "not": {}}}
    with pytest.raises(BadRequestError, match="Unimplemented"):
        chat(served, tools=[{"type": "function", "function": odd}], tool_choice=named("odd"))


def test_arguments_of_a_past_call_must_be_an_object(served: Served) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1"}}
    said = {"role": "assistant", "tool_calls": [call]}
    with pytest.raises(BadRequestError, match="no JSON object") as caught:
        chat(served, messages=[*MESSAGES, said])
    assert caught.value.param == "messages[1].tool_calls"


def test_a_template_without_tools_refuses_them(without_tools: Served) -> None:
    with pytest.raises(BadRequestError, match="its chat template leaves them out") as caught:
        chat(without_tools)
    assert caught.value.param == "tools"
    result = {"role": "tool", "tool_call_id": "a", "content": "It rains."}
    with pytest.raises(BadRequestError) as caught:
        chat(without_tools, messages=[*MESSAGES, result], tools=None, extra_body={})
    assert caught.value.param == "messages"
