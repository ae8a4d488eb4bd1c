"""Findings about a body, told by place and in a sentence."""

import pytest
from pydantic import ValidationError

from kv8.server.protocol.chat import ChatCompletionRequest
from kv8.server.protocol.completions import CompletionRequest
from kv8.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from kv8.server.protocol.validation import spell_place, validation_error


@pytest.mark.parametrize(
    ("place", "body", "spelled"),
    [
        (("body", "choice", "literal['none']"), {"choice": {"a": 1}}, "choice"),
        (("body", "n"), {"n": 0}, "n"),
        (("body", "messages", 1, "user", "content", "str"), {"messages": [{}, {"content": 5}]},
         "messages[1].content"),
        (("body", "messages", 0, "user", "content"), {"messages": [{}]}, "messages[0]"),
        (("body", "prompt", "list[int]", 2), {"prompt": [1, 2, "x"]}, "prompt[2]"),
        (("body",), {"n": 0}, ""),
        (("body", "n"), None, ""),
        (("query", "limit"), None, "limit"),
    ],
)  # fmt: skip
def test_places_are_spelled_as_people_write_them(place, body, spelled) -> None:
    assert spell_place(place, body) == spelled


def test_what_is_missing_has_a_place() -> None:
    place = ("body", "messages", 0, "user", "content")
    assert spell_place(place, {"messages": [{}]}, missing=True) == "messages[0].content"


def finding(kind: str, loc: tuple, message: str = "Input should be so", value: object = 5) -> dict:
    return {"type": kind, "loc": ("body", *loc), "msg": message, "input": value}


def test_values_are_quoted_but_not_at_length() -> None:
    error = validation_error([finding("int_type", ("n",), value="x" * 5000)], {"n": "x" * 5000})
    assert error.detail.startswith("n: input should be so, got 'xxx")
    assert len(error.detail) < 200
    assert error.param == "n"


def test_of_several_alternatives_the_one_that_got_furthest_is_told() -> None:
    findings = [
        finding("string_type", ("prompt", "str"), "Input should be a valid string"),
        finding("int_type", ("prompt", "list[int]", 1), "Input should be a valid integer"),
    ]
    error = validation_error(findings, {"prompt": [1, "a"]})
    assert error.detail == "prompt[1]: input should be a valid integer, got 5."
    assert error.param == "prompt[1]"


def test_an_unknown_kind_is_told_with_those_there_are() -> None:
    context = {"discriminator": "'role'", "tag": "owner", "expected_tags": "'user', 'tool'"}
    unknown = finding("union_tag_invalid", ("messages", 0)) | {"ctx": context}
    error = validation_error([unknown], {"messages": [{"role": "owner"}]})
    assert error.detail == "messages[0].role: allowed are 'user', 'tool', got 'owner'."
    assert error.param == "messages[0].role"


def test_few_of_many_findings_are_told() -> None:
    findings = [finding("int_type", ("ids", i), value=str(i)) for i in range(9)]
    error = validation_error(findings, {"ids": ["x"] * 9})
    assert error.detail.count("input should be so") == 3
    assert error.detail.endswith("And 6 more.")
    assert error.param == "ids[0]"


def test_sentences_of_our_own_stay_and_name_their_field() -> None:
    findings = [finding("value_error", (), "Value error, user is not supported. Leave it out.")]
    error = validation_error(findings, {"user": "me"})
    assert error.detail == "user is not supported. Leave it out."
    assert error.param == "user"


def test_what_was_not_sent_as_json_is_told_as_such() -> None:
    body = b"prompt=a"
    error = validation_error([finding("model_attributes_type", (), value=body)], body)
    assert error.status_code == 400
    assert "Content-Type: application/json" in error.detail


WRONG = [None, 1.5, {}, [], True, "x"] * 500
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        (CompletionRequest, {"prompt": WRONG}),
        (CompletionRequest, {"prompt": [WRONG, WRONG]}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * 3000}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * 3000}),
        (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [1] * 3000}}),
        (ChatCompletionRequest, {"messages": WRONG}),
        (ChatCompletionRequest, {"messages": [{**USER, "content": WRONG}]}),
        (ChatCompletionRequest, {"messages": [{"role": "assistant", "tool_calls": WRONG}]}),
        (ChatCompletionRequest, {"messages": [USER], "tools": WRONG}),
        (TokenizeRequest, {"messages": WRONG}),
        (DetokenizeRequest, {"tokens": WRONG}),
    ],
)
def test_of_a_list_the_first_wrong_item_is_told(shape, body) -> None:
    """A body has room for a million; to find fault with each keeps everybody waiting."""
    with pytest.raises(ValidationError) as caught:
        shape.model_validate(body)
    assert caught.value.error_count() <= 6


@pytest.mark.parametrize(
    ("form", "largest"),
    [
        ({"choice": ["x"] * 10_000}, True),
        ({"choice": ["x"] * 10_001}, False),
        ({"regex": "x" * 131_072}, True),
        ({"regex": "x" * 131_073}, False),
        ({"grammar": "x" * 131_073}, False),
        ({"json": "x" * 131_073}, False),
    ],
)
def test_forms_have_a_largest_size(form, largest) -> None:
    """One of a million characters takes minutes to compile, on a thread that others wait for."""
    body = {"prompt": "a", "structured_outputs": form}
    if largest:
        CompletionRequest.model_validate(body)
    else:
        with pytest.raises(ValidationError, match="structured_outputs"):
            CompletionRequest.model_validate(body)
