"""Sampling parameters: what is refused, and that every field explains itself."""

import dataclasses

import pytest

from kv8.errors import RequestError
from kv8.sampling_params import SAMPLING_FIELDS, SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.max_tokens, params.n) == (1.0, 1.0, 16, 1)
    assert not params.greedy
    assert SamplingParams(temperature=0).greedy


@pytest.mark.parametrize(
    "bad",
    [
        {"n": 0},
        {"n": 1.5},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "0"},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_k": -2},
        {"top_k": True},
        {"min_p": 1.1},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"repetition_penalty": 0.0},
        {"seed": 2**63},
        {"seed": 1.0},
        {"max_tokens": 0},
        {"min_tokens": 17},
        {"min_tokens": -1},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"stop": [""]},
        {"stop": 5},
        {"stop": [5]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": 3},
        {"ignore_eos": "no"},
    ],
)
def test_a_bad_value_is_refused_by_name_and_value(bad: dict) -> None:
    [(name, value)] = bad.items()
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**bad)
    shown = value[0] if isinstance(value, list) else value
    assert repr(shown) in str(caught.value)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_stop_may_be_one_string() -> None:
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_a_list_changed_later_changes_nothing() -> None:
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("")
    ids.append(-1)
    assert params.stop_strings == ("a",)
    assert params.stop_token_ids == (1,)


def test_nothing_can_be_assigned() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_every_field_has_help() -> None:
    assert all(field.metadata["help"].endswith(".") for field in SAMPLING_FIELDS.values())
