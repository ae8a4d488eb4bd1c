"""Calibration data nobody has to bring: random tokens, and text the model writes itself."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from kv8.calibration.interrupts import raise_noticed
from kv8.calibration.packing import Joints
from kv8.engine.engine import Engine
from kv8.errors import EngineError
from kv8.sampling_params import SamplingParams

# Given how many and how long, returns that many token sequences.
WriteText: TypeAlias = Callable[[int, int], list[list[int]]]

# Texts written together: many are faster, few lose less when the work is broken off.
_GROUPS: Final = 8
_LEAST_TOGETHER: Final = 4
_MOST_TOGETHER: Final = 32


def ordinary_tokens(tokenizer: Any) -> list[int]:
    """Return the tokenizer's tokens that stand for text, ascending: all but the special ones."""
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
    return sorted({*tokenizer.get_vocab().values()} - special)


def random_samples(
    tokenizer: Any, joints: Joints, samples: int, max_length: int, *, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Return samples of ``max_length`` tokens: a prompt's beginning, then tokens drawn evenly."""
    draw, tokens = random.Random(seed), ordinary_tokens(tokenizer)
    num = max_length - len(joints.begin)
    return tuple((*joints.begin, *draw.choices(tokens, k=num)) for _ in range(samples))


def text_writer(
    engine: Engine,
    *,
    seed: int,
    on_step: Callable[[int], None] | None = None,
    written: Sequence[Sequence[int]] = (),
    on_texts: Callable[[Sequence[Sequence[int]]], None] | None = None,
) -> WriteText:
    """Return a function that lets ``engine``'s model write, sampling at temperature 1.

    Each text starts as a prompt does, or with one random token where prompts have no beginning of
    their own. The model goes on behind its end tokens until the length is reached, so that as many
    tokens are used as were asked for. The same engine options and seed give the same texts, as far
    as the model rounds alike: another thread count may make it write something else.

    Texts are written in groups that depend on nothing but their number, one group after another. So
    what comes of a group does not depend on whether those before it were written just now.

    Args:
        engine: an engine without requests.
        seed: of the first token and the sampling.
        on_step: told how many tokens have come, after each step; their sum is that of the lengths.
        written: texts of whole groups that were written before, by the same seed and for the same
            number and length; it is gone on after these.
        on_texts: told all texts there are, after each group.

    Raises:
        EngineError: (the function) the model failed while writing.
    """
    joints, tokens = Joints.of(engine.tokenizer), ordinary_tokens(engine.tokenizer)

    def write(num: int, length: int) -> list[list[int]]:
        draw = random.Random(seed)
        begins = [list(joints.begin) or [draw.choice(tokens)] for _ in range(num)]
        texts = [list(text) for text in written]
        size = min(_MOST_TOGETHER, max(_LEAST_TOGETHER, num // _GROUPS))
        for start in range(len(texts), num, size):
            group = range(start, min(start + size, num))
            requests = {number: _request(begins[number], length, seed + number) for number in group}
            texts += _write_group(engine, requests, on_step)
            if on_texts is not None:
                on_texts(texts)
        return texts

    return write


def _request(begin: list[int], length: int, seed: int) -> tuple[list[int], SamplingParams]:
    more = length - len(begin)
    return begin, SamplingParams(temperature=1.0, seed=seed, max_tokens=more, ignore_eos=True)


def _write_group(
    engine: Engine,
    requests: Mapping[int, tuple[list[int], SamplingParams]],
    on_step: Callable[[int], None] | None,
) -> list[list[int]]:
    """Return one text a request, in their order."""
    texts: dict[str, list[int]] = {}
    try:
        for number, (begin, params) in requests.items():
            name = f"self-{number}"
            texts[name] = list(begin)
            engine.add_request(name, begin, params)
        if on_step is not None:
            on_step(sum(map(len, texts.values())))
        while engine.has_unfinished:
            raise_noticed()
            before = engine.counters.generated_tokens
            for output in engine.step():
                completion = output.outputs[0]
                if completion.finish_reason == "error":
                    raise EngineError(f"The model failed while writing: {completion.error}")
                if output.finished:
                    texts[output.request_id] += completion.token_ids
            if on_step is not None:
                on_step(engine.counters.generated_tokens - before)
    except BaseException:  # ctrl-C too: the engine must be idle again
        for name in texts:
            engine.abort(name)
        raise
    return list(texts.values())
