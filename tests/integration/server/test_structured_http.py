"""Structured output over HTTP: what is asked for is what comes, or a refusal that says why."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import APIError, BadRequestError
from tests.served import Served, serving
from tests.tiny_models import TinyModel

from kv8.engine import grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Seoul", "London"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Name a city."}]


@pytest.fixture(scope="module")
def served(tiny_model: TinyModel) -> Iterator[Served]:
    with serving(tiny_model(), max_model_len=512) as server:
        yield server


def chat(served: Served, **fields: Any) -> Any:
    fields = {"messages": MESSAGES, "temperature": 0.0, "max_completion_tokens": 300} | fields
    model = served.state.model_name
    return served.openai().chat.completions.create(model=model, **fields)


def json_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, **more}}


@pytest.mark.parametrize("strict", [None, True, False])
def test_an_answer_fits_its_schema(served: Served, strict: bool | None) -> None:
    answer = chat(served, response_format=json_schema(SCHEMA, strict=strict))
    [choice] = answer.choices
    city = json.loads(choice.message.content)
    assert city["city"] in ("Seoul", "London")
    assert 0 <= city["size"] <= 99
    assert choice.finish_reason == "stop"


def test_a_streamed_answer_fits_it_too(served: Served) -> None:
    stream = chat(served, response_format=json_schema(SCHEMA), stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    whole = chat(served, response_format=json_schema(SCHEMA))
    assert text == whole.choices[0].message.content
    assert json.loads(text).keys() == {"city", "size"}


def test_any_json_object(served: Served) -> None:
    answer = chat(served, response_format={"type": "json_object"}, temperature=1.0, seed=1)
    [choice] = answer.choices
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_text_is_no_form(served: Served) -> None:
    plain = chat(served, max_completion_tokens=8)
    formed = chat(served, max_completion_tokens=8, response_format={"type": "text"})
    assert formed.choices == plain.choices


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[0-9]"}, set("0123456789")),
        ({"grammar": 'start: "a" | "b"'}, {"a", "b"}),
        ({"json": {"const": 5}}, {"5"}),
        ({"json": '{"const": 5}'}, {"5"}),
    ],
)
def test_vllms_own_field(served: Served, form: dict[str, Any], texts: set[str]) -> None:
    extra = {"structured_outputs": form}
    answer = served.openai().completions.create(
        model=served.state.model_name, prompt="The answer is ", n=3, seed=2, extra_body=extra
    )
    assert {choice.text for choice in answer.choices} <= texts
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert chat(served, extra_body=extra).choices[0].message.content in texts


FOLLOW = "cannot be followed"


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"type": "xml"}, "json_schema"),
        ({}, "type"),
        ("json_object", ""),
        ({"type": "json_schema"}, "missing"),
        (json_schema({"type": "text"}), FOLLOW),
        (json_schema({"not": {}}), "Unimplemented"),
        (json_schema({"$ref": "#"}), FOLLOW),
    ],
)
def test_a_response_format_that_cannot_be_followed_is_refused(
    served: Served, form: Any, said: str
) -> None:
    refused(served, "response_format", said, response_format=form)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({}, "exactly one"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a", "choice": ["b"]}, "regex and"),
        ({"choice": []}, "at least one"),
        ({"structural_tag": "x"}, "not known"),
    ],
)
def test_structured_outputs_that_cannot_be_followed_are_refused(
    served: Served, form: Any, said: str
) -> None:
    refused(served, "structured_outputs", said, structured_outputs=form)


def test_fields_that_contradict_a_form_are_refused_by_name(served: Served) -> None:
    form = {"regex": "a"}
    refused(served, "guided_json", "not known", guided_json={})
    refused(served, "ignore_eos", "structured", structured_outputs=form, ignore_eos=True)
    refused(served, "min_tokens", "structured", structured_outputs=form, min_tokens=2)
    both = {"structured_outputs": form, "response_format": {"type": "json_object"}}
    refused(served, "structured_outputs", "Give one", **both)


def refused(served: Served, param: str, said: str, **fields: Any) -> None:
    """Check that a request is refused, over which field and with which words."""
    with pytest.raises(BadRequestError) as caught:
        chat(served, extra_body=fields)
    error = caught.value
    assert error.param is not None
    assert error.param.startswith(param)
    assert said in error.message
    assert error.type == "invalid_request_error"
    assert served.blocks_in_use() == 0


def test_a_form_that_becomes_too_complex_on_the_way_is_refused_then(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_MOST_ITEMS", 50)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(100)}}
    with pytest.raises(BadRequestError, match="could not be followed beyond token 1") as caught:
        chat(served, response_format=json_schema(wide))
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(APIError, match="could not be followed beyond token 1") as late:
        list(chat(served, response_format=json_schema(wide), stream=True))
    assert late.value.type == "invalid_request_error"
    assert served.blocks_in_use() == 0


def test_a_slow_schema_does_not_hold_up_others(served: Served) -> None:
    """Compiling is not the engine's work: another request is answered while it goes on."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}
    answer = chat(served, response_format=json_schema(wide), max_completion_tokens=4)
    assert answer.choices[0].message.content.lstrip().startswith("{")
