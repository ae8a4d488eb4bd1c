"""Text completion over HTTP: prompts of every kind, echoes, and OpenAI's older logprobs."""

import pytest
from tests.served import Served

from kv8 import LLM, SamplingParams

PROMPT = "London is the capital of"


def complete(served: Served, prompt=PROMPT, **more):
    fields = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 8} | more
    return served.openai().completions.create(**fields)


def offline(llm: LLM, prompts, **params):
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params})
    return llm.generate(prompts, sampling, use_tqdm=False)


def streamed(chunks, num_choices: int = 1) -> list[str]:
    texts = [""] * num_choices
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    return texts


def test_greedy_text_is_that_of_llm_generate(served, llm) -> None:
    expected = offline(llm, PROMPT)[0].outputs[0]
    answer = complete(served)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.completion_tokens == len(expected.token_ids)


def test_by_default_sixteen_tokens(served) -> None:
    answer = served.client().post("/v1/completions", json={"prompt": PROMPT, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt",
    [
        ["one", "two", "three"],
        [10, 20, 30],
        [[10, 20, 30], [40, 50], [60]],
        "a single text",
    ],
)
def test_prompts_of_every_kind(served, llm, prompt, stream) -> None:
    expected = [output.outputs[0].text for output in offline(llm, prompt)]
    answer = complete(served, prompt, stream=stream)
    if stream:
        assert streamed(answer, len(expected)) == expected
    else:
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))


@pytest.mark.parametrize("stream", [False, True])
def test_n_of_each_prompt_in_order(served, llm, stream) -> None:
    params = {"n": 2, "temperature": 1.0, "seed": 3}
    results = offline(llm, ["one", "two"], **params)
    expected = [output.text for result in results for output in result.outputs]
    answer = complete(served, ["one", "two"], **params, stream=stream)
    told = streamed(answer, 4) if stream else [choice.text for choice in answer.choices]
    assert told == expected
    assert len(set(told)) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(served, llm, stream) -> None:
    expected = [PROMPT + offline(llm, PROMPT)[0].outputs[0].text]
    answer = complete(served, echo=True, stream=stream)
    assert (streamed(answer) if stream else [answer.choices[0].text]) == expected


def test_echo_of_token_numbers_is_their_text(served) -> None:
    tokens = served.client().post("/tokenize", json={"prompt": "héllo"}).json()["tokens"]
    text = complete(served, tokens[1:], echo=True).choices[0].text
    assert text.startswith("héllo")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_with_echo_score_the_prompt(served, llm, stream) -> None:
    expected = offline(llm, PROMPT, logprobs=2, prompt_logprobs=2)[0]
    answer = complete(served, echo=True, logprobs=2, stream=stream)
    told = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    logprobs = [choice.logprobs for choice in told if choice.logprobs]
    tokens = [token for part in logprobs for token in part.tokens]
    values = [value for part in logprobs for value in part.token_logprobs]
    tops = [top for part in logprobs for top in part.top_logprobs]
    offsets = [offset for part in logprobs for offset in part.text_offset]
    ids = [*expected.prompt_token_ids, *expected.outputs[0].token_ids]
    reports = [*expected.prompt_logprobs, *expected.outputs[0].logprobs]
    assert len(tokens) == len(ids)
    assert tokens[: len(expected.prompt_token_ids)] == ["<bos>", *PROMPT]
    assert values[0] is None
    assert tops[0] is None
    for value, top, token, report in zip(values[1:], tops[1:], ids[1:], reports[1:], strict=True):
        assert value == pytest.approx(report[token].logprob, abs=1e-4)
        assert 1 <= len(top) <= 3
        assert max(top.values()) == pytest.approx(max(p.logprob for p in report.values()), abs=1e-4)
    # The prompt is plain letters, each a token, after a begin token that is not in the text.
    assert offsets[1 : len(PROMPT) + 1] == list(range(len(PROMPT)))
    assert offsets == sorted(offsets)


def test_prompt_logprobs_as_vllm_tells_them(served, llm) -> None:
    expected = offline(llm, PROMPT, prompt_logprobs=1)[0]
    answer = complete(served, extra_body={"prompt_logprobs": 1})
    told = answer.choices[0].prompt_logprobs
    assert told[0] is None
    for token, entry in zip(expected.prompt_token_ids[1:], told[1:], strict=True):
        assert entry[str(token)]["decoded_token"] is not None
        assert entry[str(token)]["rank"] >= 1


def test_usage_counts_every_prompt(served) -> None:
    one = complete(served, "one").usage
    both = complete(served, ["one", "one"], stream=True, stream_options={"include_usage": True})
    usage = list(both)[-1].usage
    assert usage.prompt_tokens == 2 * one.prompt_tokens
    assert usage.completion_tokens == 2 * one.completion_tokens


def test_text_and_tokens_are_each_others_inverse(served) -> None:
    client = served.client()
    text = "héllo, wörld €"
    told = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == served.state.config.max_model_len
    back = client.post("/detokenize", json={"tokens": told["tokens"][1:]}).json()
    assert back == {"prompt": text}


def test_tokenize_reads_conversations_as_chat_does(served) -> None:
    messages = [{"role": "user", "content": "hello"}]
    told = served.client().post("/tokenize", json={"messages": messages}).json()
    answer = served.openai().chat.completions.create(
        model="tiny", messages=messages, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert told["tokens"] == answer.prompt_token_ids


def test_models_are_listed_under_every_name(served) -> None:
    listed = served.openai().models.list().data
    assert [model.id for model in listed] == ["tiny", "t4"]
    assert {model.kv_cache_dtype for model in listed} == {"fp8_e4m3"}
    assert {model.max_model_len for model in listed} == {served.state.config.max_model_len}
    assert served.openai().models.retrieve("t4").id == "t4"
    assert complete(served, model="t4").model == "t4"
