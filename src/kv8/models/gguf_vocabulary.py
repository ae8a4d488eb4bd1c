"""The tokens of a GGUF file and what each is for."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from kv8.errors import ModelError
from kv8.models.gguf_file import GGUFFile


class TokenType(IntEnum):
    """What a token is for, as GGUF numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by number.

    Attributes:
        name: the file, for messages.
        tokens: texts.
        types: what each is for.
        scores: how eagerly each is merged (higher first); empty where merges are listed instead.
        ids: number of each text.
    """

    name: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    ids: dict[str, int]

    def of_type(self, *types: TokenType) -> Iterator[tuple[int, str]]:
        """Yield number and text of the tokens of these types."""
        wanted = frozenset(types)
        for number, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in wanted:
                yield number, token

    def text(self, number: object) -> str | None:
        """Return the text of token ``number``; `None` where there is none."""
        if not isinstance(number, int) or not 0 <= number < len(self.tokens):
            return None
        return self.tokens[number]


def read_vocabulary(file: GGUFFile) -> Vocabulary:
    """Return the tokens of ``file``.

    Raises:
        ModelError: there are none, or their lists do not belong together.
    """
    metadata, name = file.metadata, file.path.name
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"{name} holds no tokenizer (tokenizer.ggml.tokens).")
    types = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    scores = metadata.get("tokenizer.ggml.scores", [])
    if not isinstance(types, list) or not isinstance(scores, list):
        raise ModelError(f"{name}: types and scores of tokens must be lists.")
    if len(types) != len(tokens) or len(scores) not in (0, len(tokens)):
        raise ModelError(
            f"{name}: {len(tokens)} tokens, but {len(types)} types and {len(scores)} scores."
        )
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if ids[token] != number)
        raise ModelError(f"{name}: the token {twice!r} stands in the vocabulary twice.")
    for token in tokens:
        if not token.isascii() and any("\ud800" <= char <= "\udfff" for char in token):
            raise ModelError(f"{name}: the token {token!r} is not UTF-8 text.")
    return Vocabulary(name, tokens, types, scores, ids)
