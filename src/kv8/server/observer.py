"""Who wants to know how requests fare: what the engine thread tells of each."""

from dataclasses import dataclass
from typing import Protocol

from kv8.outputs import FinishReason


@dataclass(frozen=True)
class FinishedPrompt:
    """One prompt of a request that has ended, whatever the reason.

    Attributes:
        seconds: from its arrival to its end.
        num_prompt_tokens: its tokens.
        num_cached_tokens: of these, found in the prefix cache.
        num_output_tokens: generated, all completions together.
        finish_reasons: one a completion.
    """

    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reasons: tuple[FinishReason, ...]


class RequestObserver(Protocol):
    """Told by the engine thread, on that thread: it must be quick, and must not raise."""

    def first_token(self, seconds: float) -> None:
        """Take the time from a prompt's arrival to its first token."""

    def next_token(self, seconds: float) -> None:
        """Take the time from one token of a completion to the next."""

    def finished(self, prompt: FinishedPrompt) -> None:
        """Take a prompt that has ended."""
