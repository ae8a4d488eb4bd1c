"""The official OpenAI client against `kv8 serve smollm2`: what an application does with a model."""

import json
from collections.abc import Iterator

import openai
import pytest
from tests.served import Served, serving

from kv8 import LLM, SamplingParams

pytestmark = pytest.mark.model

OPTIONS = {"kv_cache_dtype": "fp8", "kv_cache_memory": "64MiB"}
# Asked "What is the capital of France?", the model itself is torn between English and French (0.1
# nats, in transformers' float32 too), and e4m3 tips it. Here every token leads by a nat.
QUESTION = [{"role": "user", "content": "Name the capital of France."}]
PROMPT = "London is the capital of"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("smollm2", **OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return served.openai()


def test_greedy_text_is_that_of_the_library(client) -> None:
    with LLM("smollm2", **OPTIONS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24)
        chat = llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0].text
        text = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    fields = {"model": "smollm2", "temperature": 0, "max_tokens": 24}
    answer = client.chat.completions.create(messages=QUESTION, **fields)
    assert answer.choices[0].message.content == chat
    assert chat == "The capital of France is Paris."
    assert text.startswith(" the United Kingdom")
    chunks = client.chat.completions.create(messages=QUESTION, stream=True, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat
    assert client.completions.create(prompt=PROMPT, **fields).choices[0].text == text


def test_three_identical_requests_and_one_with_a_shared_prefix(client) -> None:
    """Pitfall 50: four answers, the same text, and the second reports cached tokens."""
    story = [{"role": "user", "content": "Tell me how bread is made, step by step, please."}]

    def ask(messages):
        return client.chat.completions.create(
            model="smollm2", messages=messages, temperature=0, max_tokens=16
        )

    answers = [ask(story) for _ in range(3)]
    texts = {answer.choices[0].message.content for answer in answers}
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert len(texts) == 1
    assert cached[1] > cached[0] >= 0
    assert cached[2] == cached[1]
    follow_up = [
        *story,
        {"role": "assistant", "content": texts.pop()},
        {"role": "user", "content": "And rolls?"},
    ]
    assert ask(follow_up).usage.prompt_tokens_details.cached_tokens >= cached[1]


def test_logprobs(client) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=4, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries).startswith(answer.choices[0].message.content)
    for entry in entries:
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token  # greedy takes the likeliest
        assert len(entry.top_logprobs) == 3


def test_a_json_schema(client) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Name a city and how many people live there."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        temperature=0,
        max_tokens=64,
    )
    told = json.loads(answer.choices[0].message.content)
    assert told.keys() == {"city", "people"}
    assert isinstance(told["people"], int)


def test_errors(client, served) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="smollm2", messages=QUESTION, store=True)
    assert refused.value.param == "store"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=QUESTION)
    longest = served.state.config.max_model_len
    with pytest.raises(openai.BadRequestError, match=f"at most {longest}"):
        client.completions.create(model="smollm2", prompt="word " * 10_000)
