"""A feed passes on what an output gained, whole or as it grows, once."""

import pytest

from kv8.outputs import CompletionOutput, Logprob, RequestOutput
from kv8.server.feed import Feed
from kv8.server.mailbox import Mailbox


def output(num_choices: int = 2) -> RequestOutput:
    completions = [
        CompletionOutput(index=i, text="", token_ids=[], logprobs=[]) for i in range(num_choices)
    ]
    return RequestOutput("1/0", "p", [7, 8], outputs=completions, num_cached_tokens=1)


def grow(request: RequestOutput, index: int, text: str, token: int) -> None:
    completion = request.outputs[index]
    completion.text += text
    completion.token_ids.append(token)
    completion.logprobs.append({token: Logprob(-1.0)})


def feed(*, stream: bool, prompt_index: int = 0) -> Feed:
    return Feed(Mailbox("1", 2, lambda _: None), prompt_index, stream=stream)


def test_a_stream_gets_each_piece_once() -> None:
    request, watched = output(), feed(stream=True, prompt_index=3)
    assert watched.take(request) is None
    grow(request, 1, "a", 5)
    update = watched.take(request)
    assert [(d.index, d.text, d.token_ids) for d in update.choices] == [(7, "a", (5,))]
    assert update.choices[0].logprobs == ({5: Logprob(-1.0)},)
    assert update.prompt.token_ids == [7, 8]
    assert update.prompt.index == 3
    assert watched.take(request) is None
    grow(request, 0, "", 6)  # a token without text yet is news, too
    grow(request, 1, "b", 7)
    update = watched.take(request)
    assert [(d.index, d.text, d.token_ids) for d in update.choices] == [
        (6, "", (6,)),
        (7, "b", (7,)),
    ]
    assert update.prompt is None


def test_the_end_is_told_once_even_without_text() -> None:
    request, watched = output(1), feed(stream=True)
    grow(request, 0, "a", 5)
    watched.take(request)
    request.outputs[0].finish_reason = "stop"
    request.outputs[0].stop_reason = "x"
    update = watched.take(request)
    assert update.choices[0].finish_reason == "stop"
    assert update.choices[0].stop_reason == "x"
    assert watched.take(request) is None


@pytest.mark.parametrize("num_steps", [1, 4])
def test_without_a_stream_everything_comes_at_the_end(num_steps) -> None:
    request, watched = output(1), feed(stream=False)
    for step in range(num_steps):
        grow(request, 0, "ab", step)
        assert watched.take(request) is None
    request.outputs[0].finish_reason = "length"
    request.finished = True
    update = watched.take(request)
    assert update.choices[0].text == "ab" * num_steps
    assert update.choices[0].token_ids == tuple(range(num_steps))
    assert update.prompt is not None
