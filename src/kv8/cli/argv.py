"""The command line before it is parsed: two habits of vLLM's flags that typer does not know.

``--kv-cache-dtype-skip-layers 0 1 -1`` takes every value up to the next flag, and a flag may be
spelled with ``_`` or with ``-``.
"""

import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from kv8.errors import RequestError

_given: ContextVar[tuple[str, ...]] = ContextVar("given", default=())
_NUMBER = re.compile(r"-\d+(-\d+)?(,.*)?")  # -1 is a layer, not a flag


@contextmanager
def given_words(argv: Sequence[str]) -> Iterator[None]:
    """Keep ``argv`` for commands that say how they were called, as `words_given`."""
    token = _given.set(tuple(argv))
    try:
        yield
    finally:
        _given.reset(token)


def words_given() -> tuple[str, ...]:
    """Return the arguments of the command that runs, as the user wrote them."""
    return _given.get()


def normalise(argv: Sequence[str], *, flags: Collection[str], lists: Collection[str]) -> list[str]:
    """Return ``argv`` as typer parses it.

    Args:
        argv: the arguments after the program's name.
        flags: every long flag there is, spelled with ``-``.
        lists: those flags that take several values.

    Raises:
        RequestError: a flag that takes several values has none.
    """
    result: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        if word == "--":
            return [*result, word, *words]
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if not name.startswith("--") or flag not in flags:
            result.append(word)
        elif flag not in lists or equals:
            result.append(flag + equals + value)
        else:
            values = _take_values(words)
            if not values:
                raise RequestError(f"{flag} needs at least one value.")
            result += [f"{flag}={value}" for value in values]
    return result


def _take_values(words: deque[str]) -> list[str]:
    values = []
    while words and (not words[0].startswith("-") or _NUMBER.fullmatch(words[0])):
        values.append(words.popleft())
    return values
