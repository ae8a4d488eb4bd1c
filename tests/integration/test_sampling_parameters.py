"""Every sampling parameter, from the outside: what it promises shows in the output."""

import pytest
import torch
from tests.engines import run, start_engine
from tests.tiny_models import EOS, PAD, prompt_ids

PROMPT = prompt_ids(20, seed=4)
PLAIN = {"max_tokens": 12, "ignore_eos": True}


def flatten(model) -> None:
    """Make logits so flat that a penalty of 1 decides."""
    model.lm_head.weight.mul_(0.02)


@pytest.fixture(scope="module")
def engine(tiny_model):
    return start_engine(tiny_model("llama"))


@pytest.fixture(scope="module")
def flat(tiny_model):
    return start_engine(tiny_model("llama", edit=flatten))


def one(engine, **params):
    return run(engine, [PROMPT], **{**PLAIN, **params})[0].outputs[0]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_the_narrowest_draw_is_greedy(narrow, flat) -> None:
    greedy, drawn = one(flat), one(flat, temperature=1.0, seed=3)
    assert drawn.token_ids != greedy.token_ids
    assert one(flat, temperature=1.0, seed=3, **narrow).token_ids == greedy.token_ids


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}])
def test_penalties_keep_output_tokens_from_coming_again(penalty, flat) -> None:
    plain = one(flat, max_tokens=80).token_ids
    assert len(set(plain)) < 80
    penalized = one(flat, max_tokens=80, **penalty).token_ids
    assert len(set(penalized)) == 80
    assert set(penalized) & set(PROMPT)  # the prompt does not count


def test_a_repetition_penalty_counts_the_prompt_too(flat) -> None:
    answer = one(flat, repetition_penalty=1e6).token_ids
    assert len(set(answer)) == len(answer)
    assert not set(answer) & set(PROMPT)


def test_max_tokens_and_min_tokens(engine) -> None:
    plain = one(engine)
    assert (len(plain.token_ids), plain.finish_reason) == (12, "length")
    first = plain.token_ids[0]
    stopped = one(engine, stop_token_ids=[first])
    assert (stopped.token_ids, stopped.finish_reason) == ([first], "stop")
    longer = one(engine, stop_token_ids=[first], min_tokens=4)
    assert first not in longer.token_ids[:3]
    assert len(longer.token_ids) >= 4


def test_stop_strings_and_whether_they_stay(engine) -> None:
    text = one(engine).text
    stop = text[3:5]
    cut = text[: text.index(stop)]
    stopped = one(engine, stop=[stop, "never said"])
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (cut, "stop", stop)
    assert one(engine, stop=stop, include_stop_str_in_output=True).text == cut + stop


def test_the_end_token_ends_unless_ignored_and_shows_only_if_asked(tiny_model) -> None:
    def only_specials(model) -> None:  # one of two opposite logits is always the largest
        model.lm_head.weight[EOS] = 100 * torch.randn(
            64, generator=torch.Generator().manual_seed(1)
        )
        model.lm_head.weight[PAD] = -model.lm_head.weight[EOS]

    engine = start_engine(tiny_model("llama", edit=only_specials))
    ignored = one(engine)
    assert set(ignored.token_ids) == {PAD, EOS}
    assert ignored.text == ""
    shown = one(engine, skip_special_tokens=False).text
    assert shown == "".join({PAD: "<pad>", EOS: "<eos>"}[token] for token in ignored.token_ids)
    ended = one(engine, ignore_eos=False)
    assert ended.token_ids == ignored.token_ids[: ignored.token_ids.index(EOS) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)


def test_logprobs_are_counted_as_asked(engine) -> None:
    [output] = run(engine, [PROMPT], **PLAIN, logprobs=3, prompt_logprobs=2)
    assert [len(entries) for entries in output.outputs[0].logprobs] == [3] * 12
    assert output.prompt_logprobs[0] is None
    for token, entries in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True):
        assert len(entries) == 2 + (entries[token].rank > 2)
    # A prompt token's entry is what a cold run of the prefix before it gives.
    [shorter] = run(engine, [PROMPT[:-1]], max_tokens=1, logprobs=20)
    entries = shorter.outputs[0].logprobs[0]
    best = next(iter(sorted(entries, key=lambda token: entries[token].rank)))
    given = output.prompt_logprobs[-1]
    assert given[best].logprob == pytest.approx(entries[best].logprob, abs=1e-4)
