"""The form of an output: what is refused, and that it cannot be changed behind one's back."""

import dataclasses

import pytest

from kv8.errors import RequestError
from kv8.sampling_params import SamplingParams
from kv8.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({}, "got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
        ({"json": {}, "json_object": True}, "got json and json_object"),
        ({"json_object": 1}, "json_object must be True or False, got 1"),
        ({"json": 5}, "json must be text that is not empty, got 5"),
        ({"json": False}, "json must be text that is not empty, got False"),
        ({"json": ""}, "json must be text"),
        ({"json": {"const": float("nan")}}, "json is no JSON schema"),
        ({"json": {"const": object()}}, "json is no JSON schema"),
        ({"regex": ""}, "regex must be text that is not empty"),
        ({"regex": "\ud800"}, "regex holds what is no text in UTF-8"),
        ({"json": {"const": "\ud800"}}, "json holds what is no text in UTF-8"),
        ({"grammar": ["start: x"]}, "grammar must be text"),
        ({"choice": []}, "choice must be a list of at least one text"),
        ({"choice": "ab"}, "choice must be a list"),
        ({"choice": ["a", 5]}, "choice must be text that is not empty, got 5"),
        ({"choice": [""]}, "choice must be text that is not empty"),
    ],
)
def test_a_bad_form_is_refused(bad: dict, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        StructuredOutputsParams(**bad)


def test_a_schema_nested_beyond_reason_is_refused() -> None:
    schema: dict = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="json is no JSON schema"):
        StructuredOutputsParams(json=schema)
    while schema:  # taken apart by hand: what frees it otherwise recurses as well
        schema = schema.pop("items")


def test_what_its_owner_changes_later_changes_nothing() -> None:
    schema, choice = {"type": "integer"}, ["a"]
    forms = StructuredOutputsParams(json=schema), StructuredOutputsParams(choice=choice)
    schema["type"] = "string"
    choice.append("b")
    assert forms[0] == StructuredOutputsParams(json={"type": "integer"})
    assert forms[1] == StructuredOutputsParams(choice=("a",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        forms[1].choice = ("b",)  # type: ignore[misc]


def test_equal_forms_are_one_form() -> None:
    forms = [StructuredOutputsParams(json={"const": "ä"}) for _ in range(2)]
    assert len({*forms, StructuredOutputsParams(json='{"const": "ä"}')}) == 1
    assert forms[0] != StructuredOutputsParams(regex='{"const": "ä"}')


@pytest.mark.parametrize("contradiction", [{"ignore_eos": True}, {"min_tokens": 1}])
def test_what_a_complete_output_cannot_keep_is_refused(contradiction: dict) -> None:
    [(name, value)] = contradiction.items()
    with pytest.raises(RequestError, match=rf"{name} must be .* with structured_outputs.*{value}"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **contradiction)


@pytest.mark.parametrize("bad", [{"type": "object"}, "a", True])
def test_sampling_parameters_take_a_form_and_nothing_else(bad: object) -> None:
    with pytest.raises(RequestError, match="structured_outputs must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs=bad)  # type: ignore[arg-type]
