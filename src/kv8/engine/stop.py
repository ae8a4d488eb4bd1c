"""What ends an output from within: end tokens, stop tokens and stop strings."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kv8.engine.detokenizer import Detokenizer
from kv8.sampling_params import SamplingParams


@dataclass(frozen=True)
class Stop:
    """An output has ended: by which stop string or stop token; `None` is the model's end token."""

    reason: str | int | None


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces.

    The first is the one that is complete first; of two complete at once, the longer. How the text
    is cut into pieces makes no difference.

    Args:
        strings: what to look for; may be empty.
        include: whether the text goes to the end of the string found, or to its start.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._strings = strings
        self._include = include
        self._reach = max(map(len, strings), default=1) - 1
        self._recent = ""  # the last `_reach` characters, in which a string may have begun
        self._num_held = 0  # how many of them were not released

    def push(self, piece: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take the next piece of text.

        Args:
            piece: the text.
            armed: whether a string that is complete within this piece counts.

        Returns:
            The text now sure to belong to the output, and the string found. After one was found
            there is nothing more to push.
        """
        text = self._recent + piece
        first_new = len(self._recent) - self._num_held
        match = self._find(text, len(self._recent)) if armed else None
        if match is not None:
            start, string = match
            return text[first_new : start + len(string) * self._include], string
        self._num_held = self._open_length(text)
        released = text[first_new : len(text) - self._num_held]
        self._recent = text[-self._reach :] if self._reach else ""
        return released, None

    def flush(self) -> str:
        """Return the text kept back because a string might have begun in it."""
        held = self._recent[len(self._recent) - self._num_held :]
        self._num_held = 0
        return held

    def _find(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Return start and string of the match that ends first, beyond the first ``num_old``."""
        matches = []
        for string in self._strings:
            start = text.find(string, max(0, num_old - len(string) + 1))
            if start >= 0:
                matches.append((start + len(string), start, string))
        if not matches:
            return None
        _, start, string = min(matches)
        return start, string

    def _open_length(self, text: str) -> int:
        """Return how long an end of ``text`` may be the beginning of one of the strings."""
        for length in range(min(self._reach, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self._strings):
                return length
        return 0


class OutputText:
    """One sequence's text as it grows, and the check whether a token ended it.

    Args:
        detokenizer: of this sequence.
        params: its parameters.
        end_token_ids: the model's end tokens.

    Attributes:
        text: what is sure to be part of the output; it only ever grows.
    """

    def __init__(
        self, detokenizer: Detokenizer, params: SamplingParams, end_token_ids: Collection[int]
    ) -> None:
        self.text = ""
        self._detokenizer = detokenizer
        self._end_token_ids = frozenset(() if params.ignore_eos else end_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        self._include = params.include_stop_str_in_output
        self._strings = StopStrings(params.stop_strings, include=self._include)
        self._found: str | None = None
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def append(self, token_id: int) -> Stop | None:
        """Take the next output token; return what it ended the output with, if it did.

        A token that ends the output shows in the text only if
        ``include_stop_str_in_output`` says so.
        """
        self._num_tokens += 1
        armed = self._num_tokens >= self._min_tokens
        stop = self._token_stop(token_id) if armed else None
        if stop is not None and not self._include:
            return stop
        piece = self._detokenizer.push(token_id)
        released, self._found = self._strings.push(piece, armed=armed)
        self.text += released
        return stop if self._found is None else Stop(self._found)

    def finish(self) -> None:
        """Release what was kept back; call once the output has ended, for whatever reason.

        Bytes kept back for a character that never came are shown as replacement characters.
        """
        if self._found is None:
            released, _ = self._strings.push(self._detokenizer.flush(), armed=False)
            self.text += released + self._strings.flush()

    def _token_stop(self, token_id: int) -> Stop | None:
        if token_id in self._end_token_ids:
            return Stop(None)
        if token_id in self._stop_token_ids:
            return Stop(token_id)
        return None
