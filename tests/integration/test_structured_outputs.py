"""Outputs in a form, from whole engines: valid, repeatable, and nobody else's business."""

import json
import re
from typing import Any

import pytest
from tests.engines import finish, run, start_engine
from tests.tiny_models import EOS, TinyModel, prompt_ids

from kv8.errors import RequestError
from kv8.llm import LLM
from kv8.sampling_params import SamplingParams
from kv8.structured_outputs import StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WORD = r"[a-z]{12,40}\."
MANY = {"max_tokens": 400}


def form(**given: Any) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(**given)}


def test_an_output_fits_its_schema_and_ends_by_itself(tiny_model: TinyModel) -> None:
    engine = start_engine(tiny_model())
    prompts = [prompt_ids(5, seed=i) for i in range(6)]
    for output in run(engine, prompts, **form(json=PERSON), **MANY, temperature=1.0, seed=1):
        [completion] = output.outputs
        person = json.loads(completion.text)
        assert person.keys() == {"name", "age", "tags"}
        assert len(person["name"]) <= 8
        assert 0 <= person["age"] <= 150
        assert completion.finish_reason == "stop"
        assert completion.stop_reason is None
        assert completion.token_ids[-1] == EOS


def test_greedy_takes_the_best_token_that_fits(tiny_model: TinyModel) -> None:
    """The choice whose first letter the model likes best wins, and stands whole."""
    engine = start_engine(tiny_model())
    [free] = run(engine, [prompt_ids(6)], max_tokens=1, logprobs=20)
    [entry] = free.outputs[0].logprobs
    letters = {p.decoded_token: p.logprob for p in entry.values() if p.decoded_token.isascii()}
    words = [letter + "-word" for letter in letters if letter.isprintable()]
    assert len(words) > 2
    [output] = run(engine, [prompt_ids(6)], **form(choice=words))
    assert output.outputs[0].text == max(words, key=lambda word: letters[word[0]])


def test_every_completion_of_a_prompt_has_the_form_and_a_course_of_its_own(
    tiny_model: TinyModel,
) -> None:
    engine = start_engine(tiny_model())
    params = form(regex=WORD) | {"n": 5, "temperature": 1.0, "seed": 7, "max_tokens": 60}
    [output] = run(engine, [prompt_ids(5)], **params)
    words = [completion.text for completion in output.outputs]
    assert all(re.fullmatch(WORD, word) for word in words)
    assert len(set(words)) == 5


def test_a_form_is_nobody_else_s_business(tiny_model: TinyModel) -> None:
    engine = start_engine(tiny_model())
    prompts = [prompt_ids(9, seed=i) for i in range(4)]
    forms: list[dict[str, Any]] = [{}, form(regex=WORD), {}, form(json=PERSON)]
    common = {"temperature": 0.8, "seed": 3, "max_tokens": 50, "logprobs": 1}
    alone = [
        run(engine, [prompt], **common, **given)[0]
        for prompt, given in zip(prompts, forms, strict=True)
    ]
    for number, (prompt, given) in enumerate(zip(prompts, forms, strict=True)):
        engine.add_request(str(number), prompt, SamplingParams(**common, **given))
    assert [o.outputs for o in finish(engine)] == [o.outputs for o in alone]


def test_preemption_does_not_show(tiny_model: TinyModel) -> None:
    params = form(regex="([a-z]{30}-){4}") | {"temperature": 1.0, "seed": 5, "max_tokens": 200}
    prompts = [prompt_ids(20, seed=i) for i in range(4)]
    roomy = run(start_engine(tiny_model()), prompts, **params)
    # 32 blocks of 16 tokens: 3 sequences of 20 + 125 tokens, and the fourth pushes out.
    tight = start_engine(tiny_model(), kv_cache_memory="192KiB", max_num_seqs=4)
    outputs = run(tight, prompts, **params)
    assert tight.num_preemptions > 0
    assert [o.outputs for o in outputs] == [o.outputs for o in roomy]
    assert all(re.fullmatch("([a-z]{30}-){4}", o.outputs[0].text) for o in outputs)


def test_an_output_cut_off_says_so(tiny_model: TinyModel) -> None:
    [output] = run(start_engine(tiny_model()), [prompt_ids(5)], **form(regex="a{50}"), max_tokens=9)
    assert output.outputs[0].text == 9 * "a"
    assert output.outputs[0].finish_reason == "length"


def test_a_stop_string_ends_an_output_within_its_form(tiny_model: TinyModel) -> None:
    params = form(regex="ab+c") | {"max_tokens": 30, "stop": ["b"]}
    [output] = run(start_engine(tiny_model()), [prompt_ids(5)], **params)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("a", "b")
    params["stop"] = ["zz"]  # never complete, so nothing may be kept back
    params |= form(choice=["xyz"])
    [output] = run(start_engine(tiny_model()), [prompt_ids(5)], **params)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("xyz", None)


def test_penalties_cannot_break_a_form(tiny_model: TinyModel) -> None:
    params = form(regex="a{40}") | {"max_tokens": 60, "repetition_penalty": 1e30}
    params |= {"frequency_penalty": 2.0, "presence_penalty": 2.0}
    [output] = run(start_engine(tiny_model()), [prompt_ids(5)], **params)
    assert output.outputs[0].text == 40 * "a"


def test_a_form_that_cannot_be_followed_is_refused_before_anything_runs(
    tiny_model: TinyModel,
) -> None:
    engine = start_engine(tiny_model())
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "text"}))
    with pytest.raises(RequestError, match="JSON schema cannot be followed"):
        engine.add_request("0", prompt_ids(3), bad)
    assert not engine.has_unfinished
    engine.check_invariants()


def test_llm_takes_a_form(tiny_model: TinyModel) -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), temperature=0.0
    )
    with LLM(tiny_model(), kv_cache_memory="2MiB") as llm:
        [output] = llm.generate("Is it?", params, use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")
