"""The load of serve_load.py: requests of mixed lengths, made up from a seed."""

import random
from dataclasses import dataclass

SHORTEST_PROMPT, LONGEST_PROMPT = 16, 256
FEWEST_TOKENS, MOST_TOKENS = 8, 96
LONGEST = LONGEST_PROMPT + MOST_TOKENS  # of a sequence


@dataclass(frozen=True)
class Work:
    """One request: its prompt, and how many tokens it asks for, past any end token."""

    prompt: list[int]
    max_tokens: int


def make_work(draw: random.Random, vocab_size: int) -> Work:
    """Return the next request. No two share a prefix, so none is served from another's."""
    length = draw.randint(SHORTEST_PROMPT, LONGEST_PROMPT)
    first = min(64, vocab_size // 4)  # special tokens usually come first
    prompt = [draw.randrange(first, vocab_size) for _ in range(length)]
    return Work(prompt, draw.randint(FEWEST_TOKENS, MOST_TOKENS))


def round_of_work(seed: int, number: int, count: int, vocab_size: int) -> list[Work]:
    """Return the requests of one round; another round has others of the same kind."""
    draw = random.Random(f"{seed} round {number}")
    return [make_work(draw, vocab_size) for _ in range(count)]
