"""Tokens to text, one token at a time, never splitting a character.

A token may hold part of a character, and what it stands for may depend on its neighbours (a leading
space, say). So each step decodes a short window that starts a few tokens back, returns what is new
in it, and keeps back an end that may still turn into something else. Put together, the pieces are
what decoding everything at once gives.
"""

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are no character
_MAX_BYTES = 4  # of a character in UTF-8, so 3 tokens at most can wait for their end
_CONTEXT = 6  # tokens decoded before the new ones
_MAX_WINDOW = 64  # tokens; only bytes that never become text get there


class TokenDecoder:
    """What detokenization needs of a tokenizer; shared by all sequences of an engine.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._num_tokens = len(tokenizer)
        self._special = frozenset(
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` as it is: special tokens written out, no clean-up."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether ``token_id`` is a special token."""
        return token_id in self._special

    def has_text(self, token_id: int) -> bool:
        """Whether ``token_id`` is one of the tokenizer's (models may have more, as padding)."""
        return token_id < self._num_tokens


class Detokenizer:
    """One sequence's output text, piece by piece.

    Args:
        decoder: of the model's tokenizer.
        prompt_token_ids: what the output follows; its last tokens are context.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(
        self, decoder: TokenDecoder, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._decoder = decoder
        self._skip_special = skip_special_tokens
        self._window = self._prompt_context(prompt_token_ids)
        text = decoder.decode(self._window)
        self._num_given = len(text)  # characters of the window's text that were returned
        # Where the window may start next: between two characters, or bytes would be torn apart.
        self._next_start = 0 if text.endswith(_REPLACEMENT) else len(self._window)
        self._num_waiting = 0  # tokens since the text last ended in a whole character

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes, often its own, sometimes none."""
        if not self._shows(token_id):
            return ""
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        num_held = len(text) - len(text.rstrip(_REPLACEMENT))
        self._num_waiting = self._num_waiting + 1 if num_held else 0
        if self._num_waiting >= _MAX_BYTES:  # not a character in the making: some bytes are none
            num_held = min(num_held, _MAX_BYTES - 1)
        piece = text[self._num_given : len(text) - num_held]
        self._num_given = max(self._num_given, len(text) - num_held)
        self._move_window(num_held)
        return piece

    def flush(self) -> str:
        """Return what was kept back; call once, after the last token."""
        text = self._decoder.decode(self._window)
        piece = text[self._num_given :]
        self._num_given = len(text)
        return piece

    def _move_window(self, num_held: int) -> None:
        if num_held == 0 and len(self._window) - self._next_start >= _CONTEXT:
            start = self._next_start
        elif len(self._window) > _MAX_WINDOW:
            start = len(self._window) - _CONTEXT
        else:
            return
        del self._window[:start]
        self._next_start = len(self._window) if num_held == 0 else 0
        self._num_given = len(self._decoder.decode(self._window)) - num_held

    def _shows(self, token_id: int) -> bool:
        if self._skip_special and self._decoder.is_special(token_id):
            return False
        return self._decoder.has_text(token_id)

    def _prompt_context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the prompt's last tokens, a few more if they would begin inside a character."""
        recent = prompt_token_ids[-4 * _CONTEXT :]
        shown = [token for token in recent if self._shows(token)]
        for num_tokens in range(_CONTEXT, _CONTEXT + _MAX_BYTES):
            context = shown[-num_tokens:]
            if not self._decoder.decode(context).startswith(_REPLACEMENT):
                break
        return context
