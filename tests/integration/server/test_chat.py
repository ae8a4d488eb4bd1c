"""Chat over HTTP with the official client: the same answers as from Python, told OpenAI's way."""

import openai
import pytest
from tests.served import Served

from kv8 import LLM, SamplingParams

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
]


def ask(served: Served, **more):
    fields = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12} | more
    return served.openai().chat.completions.create(**fields)


def offline(llm: LLM, messages=MESSAGES, **params):
    return llm.chat(
        messages,
        SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params}),
        use_tqdm=False,
    )[0]


def test_a_greedy_answer_is_that_of_llm_chat(served, llm) -> None:
    expected = offline(llm)
    answer = ask(served, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == expected.outputs[0].text
    assert choice.token_ids == expected.outputs[0].token_ids
    assert answer.prompt_token_ids == expected.prompt_token_ids
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == "tiny"
    assert answer.object == "chat.completion"


def test_a_stream_is_the_answer_in_pieces(served) -> None:
    whole = ask(served, max_tokens=40)
    chunks = list(ask(served, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.usage for chunk in chunks[:-1]} == {None}


def test_without_include_usage_no_chunk_has_it(served) -> None:
    chunks = list(ask(served, stream=True))
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers(served, llm, stream) -> None:
    params = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 10}
    expected = [output.text for output in offline(llm, **params).outputs]
    assert len(set(expected)) == 3
    answer = ask(served, **params, stream=stream)
    texts = ["", "", ""]
    if stream:
        for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = [choice.message.content for choice in answer.choices]
    assert texts == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(served, llm, stream) -> None:
    text = offline(llm, max_tokens=40).outputs[0].text
    stop = text[10:13]
    expected = text[: text.index(stop)]
    answer = ask(served, max_tokens=40, stop=[stop], stream=stream)
    if stream:
        chunks = list(answer)
        told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason, by = chunks[-1].choices[0].finish_reason, chunks[-1].choices[0].stop_reason
    else:
        choice = answer.choices[0]
        told, reason, by = choice.message.content, choice.finish_reason, choice.stop_reason
    assert (told, reason, by) == (expected, "stop", stop)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_engine(served, llm, stream) -> None:
    expected = offline(llm, logprobs=3, max_tokens=6).outputs[0]
    answer = ask(served, max_tokens=6, logprobs=True, top_logprobs=3, stream=stream)
    if stream:
        told = [
            entry
            for chunk in answer
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content
        ]
    else:
        told = answer.choices[0].logprobs.content
    assert len(told) == len(expected.token_ids)
    for entry, token, report in zip(told, expected.token_ids, expected.logprobs, strict=True):
        assert entry.token == report[token].decoded_token
        # The same engine step, whatever else runs beside it, but another batch may round.
        assert entry.logprob == pytest.approx(report[token].logprob, abs=1e-4)
        best = sorted((p.logprob for p in report.values()), reverse=True)[:3]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best, abs=1e-4)
        if "\ufffd" in entry.token:
            assert entry.bytes is None
        else:
            assert bytes(entry.bytes).decode() == entry.token


def test_logprobs_alone_report_the_chosen_token(served) -> None:
    for entry in ask(served, logprobs=True).choices[0].logprobs.content:
        assert entry.top_logprobs == []


def test_a_seed_makes_a_draw_repeatable(served) -> None:
    texts = {ask(served, temperature=1.0, seed=11).choices[0].message.content for _ in range(3)}
    assert len(texts) == 1
    assert texts != {ask(served, temperature=1.0, seed=12).choices[0].message.content}


@pytest.mark.parametrize(
    "params", [{"presence_penalty": 1.5}, {"frequency_penalty": 1.5}, {"top_p": 0.5, "seed": 3}]
)
def test_parameters_reach_the_engine(served, llm, params) -> None:
    params = {"temperature": 0.8, "seed": 5} | params
    expected = offline(llm, **params).outputs[0].text
    assert ask(served, **params).choices[0].message.content == expected


@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.4}, {"top_k": 2, "seed": 3}, {"min_tokens": 12}]
)
def test_parameters_that_openai_lacks_reach_the_engine(served, llm, params) -> None:
    params = {"temperature": 0.8, "seed": 5} | params
    expected = offline(llm, **params).outputs[0].text
    told = ask(served, temperature=0.8, extra_body=params)
    assert told.choices[0].message.content == expected


def test_both_names_of_the_token_limit(served) -> None:
    assert ask(served, max_tokens=3).usage.completion_tokens == 3
    client = served.openai()
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=3
    )
    assert answer.usage.completion_tokens == 3
    assert ask(served, max_completion_tokens=12).usage.completion_tokens <= 12
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens"):
        ask(served, max_tokens=3, max_completion_tokens=4)


def test_text_in_parts_and_developers_are_read(served, llm) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}]
    expected = offline(
        llm,
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is\nthis?"}],
    )
    told = ask(
        served,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts},
        ],
    )
    assert told.choices[0].message.content == expected.outputs[0].text


def test_nulls_are_fields_left_out(served) -> None:
    nulls = dict.fromkeys(("stop", "seed", "n", "top_p", "logit_bias", "user", "tools"))
    answer = served.client().post(
        "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 2} | nulls
    )
    assert answer.status_code == 200


def test_repeats_and_shared_prefixes_are_cached(served) -> None:
    """Pitfall 50: four answers, the same text, and the second reports cached tokens."""
    question = {"role": "user", "content": "Tell me of the river that runs through Paris."}
    answers = [ask(served, messages=[question]) for _ in range(3)]
    longer = [question, {"role": "assistant", "content": "x"}, {"role": "user", "content": "And?"}]
    shared = ask(served, messages=longer)
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert answers[0].usage.prompt_tokens_details.cached_tokens == 0
    assert answers[1].usage.prompt_tokens_details.cached_tokens > 0
    assert answers[2].usage.prompt_tokens_details.cached_tokens > 0
    assert shared.usage.prompt_tokens_details.cached_tokens > 0
