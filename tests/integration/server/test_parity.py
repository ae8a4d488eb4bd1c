"""What HTTP gives is what `LLM.generate` gives: texts, tokens, log probabilities, reasons."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.served import Served, serving
from tests.tiny_models import TinyModel, prompt_ids

from kv8.llm import LLM
from kv8.outputs import CompletionOutput, RequestOutput
from kv8.sampling_params import SamplingParams
from kv8.structured_outputs import StructuredOutputsParams

OPTIONS = {"kv_cache_dtype": "fp8_e4m3", "kv_cache_memory": "2MiB", "max_model_len": 256}
# The server computes prompts alone here and the engine together; float32 sums may differ in the
# last bits, and a log probability is a sum over 260 of them.
LOGPROB_TOLERANCE = 1e-4

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 7},
    "seeded, hot": {"seed": -(2**63), "temperature": 1.7},
    "several": {"seed": 11, "n": 3},
    "top_p": {"seed": 1, "top_p": 0.4},
    "top_k": {"seed": 1, "top_k": 5},
    "min_p": {"seed": 1, "min_p": 0.2},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {"seed": 3, "frequency_penalty": -1.5},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.8},
    "logprobs": {"temperature": 0.0, "logprobs": 4},
    "seeded logprobs": {"seed": 4, "logprobs": 0, "n": 2},
    "stop": {"temperature": 0.0, "stop": ["e", "\n"]},
    "stop, kept": {"seed": 2, "stop": ["a", "o", "e"], "include_stop_str_in_output": True},
    "stop tokens": {"seed": 2, "stop_token_ids": list(range(40, 60))},
    "past the end": {"seed": 5, "ignore_eos": True, "min_tokens": 20},
    "special tokens": {"seed": 6, "skip_special_tokens": False, "ignore_eos": True},
}
OPENAI_FIELDS = {
    "temperature", "seed", "n", "top_p", "presence_penalty", "frequency_penalty", "logprobs",
    "stop",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel) -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def served(folder: Any) -> Iterator[Served]:
    with serving(folder, **OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def llm(folder: Any) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as one:
        yield one


def generate(llm: LLM, prompt: Any, case: dict[str, Any]) -> RequestOutput:
    [output] = llm.generate(prompt, SamplingParams(max_tokens=24, **case), use_tqdm=False)
    return output


def ask(served: Served, prompt: Any, case: dict[str, Any], **more: Any) -> Any:
    """Complete ``prompt`` with the official client."""
    own = {name: value for name, value in case.items() if name in OPENAI_FIELDS}
    extra = {name: value for name, value in case.items() if name not in OPENAI_FIELDS}
    extra["return_token_ids"] = True
    return served.openai().completions.create(
        model=served.state.model_name, prompt=prompt, max_tokens=24, extra_body=extra, **own, **more
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_those_of_generate(
    served: Served, llm: LLM, name: str, stream: bool
) -> None:
    case = CASES[name]
    prompt = prompt_ids(13, seed=len(name))
    expected = generate(llm, prompt, case).outputs
    got = streamed(served, prompt, case) if stream else whole(served, prompt, case)
    assert [entry["text"] for entry in got] == [output.text for output in expected]
    assert [entry["token_ids"] for entry in got] == [output.token_ids for output in expected]
    reasons = [(output.finish_reason, output.stop_reason) for output in expected]
    assert [(entry["finish_reason"], entry["stop_reason"]) for entry in got] == reasons
    for entry, output in zip(got, expected, strict=True):
        same_logprobs(entry["logprobs"], output)


def whole(served: Served, prompt: Any, case: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "text": choice.text,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "logprobs": None if choice.logprobs is None else choice.logprobs.token_logprobs,
        }
        for choice in ask(served, prompt, case).choices
    ]


def streamed(served: Served, prompt: Any, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a streamed answer, put together."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in ask(served, prompt, case, stream=True):
        for choice in chunk.choices:
            entry = found.setdefault(
                choice.index, {"text": "", "token_ids": [], "logprobs": None, "finish_reason": None}
            )
            assert entry["finish_reason"] is None, "nothing comes after the end"
            entry["text"] += choice.text
            entry["token_ids"] += choice.token_ids or []
            if choice.logprobs is not None:
                entry["logprobs"] = (entry["logprobs"] or []) + choice.logprobs.token_logprobs
            entry["finish_reason"] = choice.finish_reason
            entry["stop_reason"] = choice.stop_reason
    return [found[index] for index in sorted(found)]


def same_logprobs(got: list[float] | None, expected: CompletionOutput) -> None:
    if expected.logprobs is None:
        assert got is None
        return
    chosen = zip(expected.logprobs, expected.token_ids, strict=True)
    values = [entries[token].logprob for entries, token in chosen]
    assert got == pytest.approx(values, abs=LOGPROB_TOLERANCE)


def test_the_most_likely_tokens_are_the_same(served: Served, llm: LLM) -> None:
    prompt = prompt_ids(9, seed=3)
    case = {"temperature": 0.0, "logprobs": 3}
    [expected] = generate(llm, prompt, case).outputs
    [choice] = ask(served, prompt, case).choices
    assert expected.logprobs is not None
    for got, entries in zip(choice.logprobs.top_logprobs, expected.logprobs, strict=True):
        by_text: dict[str, float] = {}  # several tokens may be the same text; the likeliest counts
        for entry in sorted(entries.values(), key=lambda entry: entry.logprob):
            by_text[entry.decoded_token or ""] = entry.logprob
        assert got == pytest.approx(by_text, abs=LOGPROB_TOLERANCE)


def test_chat_is_that_of_chat(served: Served, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Where is Seoul?"}]
    [expected] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    answer = served.openai().chat.completions.create(
        model=served.state.model_name, messages=messages, temperature=0, max_completion_tokens=20
    )
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_a_form_gives_what_it_gives_without_a_server(served: Served, llm: LLM) -> None:
    schema = {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 2, "maxItems": 4}
    form = StructuredOutputsParams(json=schema)
    prompt = prompt_ids(6)
    params = SamplingParams(seed=9, max_tokens=200, structured_outputs=form)
    [expected] = llm.generate(prompt, params, use_tqdm=False)
    described = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}}
    answer = served.openai().completions.create(
        model=served.state.model_name, prompt=prompt, max_tokens=200, seed=9, extra_body={"response_format": described}
    )
    assert answer.choices[0].text == expected.outputs[0].text
