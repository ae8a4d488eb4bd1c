"""What a request's answer comes in: pieces small enough to send, merged while nobody takes them.

The engine thread makes the pieces, the event loop reads them. A reader that is slow, or has
stopped, finds one larger piece later; nobody waits for it, and what is kept for it is never more
than the whole answer.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kv8.outputs import FinishReason, Logprob

TokenLogprobs: TypeAlias = Mapping[int, Logprob]


@dataclass(frozen=True)
class ChoiceDelta:
    """What one completion gained.

    Attributes:
        index: which choice of the answer; prompt number times ``n``, plus the completion's number.
        text: new text, never part of a character.
        token_ids: new tokens. Text may lag behind them, by an unfinished character or by what
            may be the beginning of a stop string.
        logprobs: one entry a new token, if they were asked for.
        finish_reason: why it ended, if it has.
        stop_reason: the stop string or stop token that ended it.
        error: what failed, if it ended with ``error``.
        refused: whether that lay in what was asked for.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    refused: bool = False

    def __add__(self, later: "ChoiceDelta") -> "ChoiceDelta":
        logprobs = self.logprobs
        if logprobs is not None and later.logprobs is not None:
            logprobs += later.logprobs
        return ChoiceDelta(
            index=self.index,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=logprobs,
            finish_reason=later.finish_reason,
            stop_reason=later.stop_reason,
            error=later.error,
            refused=later.refused,
        )


@dataclass(frozen=True)
class PromptReport:
    """What is known of a prompt once it is computed.

    Attributes:
        index: which of the request's prompts.
        text: its text, if it was given as text.
        token_ids: its tokens.
        num_cached_tokens: of these, found in the prefix cache.
        logprobs: for each token (the first has none), if they were asked for.
    """

    index: int
    text: str | None
    token_ids: Sequence[int]
    num_cached_tokens: int
    logprobs: Sequence[TokenLogprobs | None] | None


@dataclass(frozen=True)
class Update:
    """What one step did for one prompt of a request."""

    choices: tuple[ChoiceDelta, ...]
    prompt: PromptReport | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens read and written so far; names are OpenAI's."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Mailbox:
    """One request's answer, on the event loop's side. Nothing here is touched by other threads.

    Args:
        request_id: the answer's name.
        num_choices: completions the answer has, of all prompts together.
        close: ends the request if it has not ended.

    Attributes:
        prompts: a report on each prompt that has been computed, by its number.
    """

    def __init__(
        self, request_id: str, num_choices: int, close: Callable[["Mailbox"], None]
    ) -> None:
        self.request_id = request_id
        self.num_choices = num_choices
        self.prompts: dict[int, PromptReport] = {}
        self._close = close
        self._pending: dict[int, ChoiceDelta] = {}
        self._finished: set[int] = set()
        self._num_output_tokens = 0
        self._accepted = False
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def close(self) -> None:
        """End the request now, if it has not ended: the engine frees its blocks at once."""
        self._close(self)

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return len(self._finished) == self.num_choices

    @property
    def usage(self) -> Usage:
        """Tokens of the prompts that have been computed, and of the output so far."""
        reports = self.prompts.values()
        return Usage(
            prompt_tokens=sum(len(report.token_ids) for report in reports),
            completion_tokens=self._num_output_tokens,
            cached_tokens=sum(report.num_cached_tokens for report in reports),
        )

    async def accepted(self) -> None:
        """Wait until the engine has queued the request.

        Raises:
            RequestError: the engine refuses it; the message says what could be served.
            EngineError: the engine failed.
        """
        while not self._accepted:
            await self._next_news()

    async def next(self) -> list[ChoiceDelta]:
        """Wait for what is new and return it, one piece a choice; empty after the end.

        Raises:
            EngineError: the engine failed; nothing more comes.
        """
        while not (self._pending or self.ended):
            await self._next_news()
        return self._take()

    async def rest(self) -> list[ChoiceDelta]:
        """Wait for the end and return all that nobody has taken, one piece a choice.

        Raises:
            EngineError: the engine failed.
        """
        while not self.ended:
            await self._next_news()
        return self._take()

    def accept(self) -> None:
        """Record that the engine has queued the request."""
        self._accepted = True
        self._news.set()

    def put(self, update: Update) -> None:
        """Add what a step made; it is merged with what nobody has taken yet."""
        if update.prompt is not None:
            self.prompts[update.prompt.index] = update.prompt
        for delta in update.choices:
            before = self._pending.get(delta.index)
            self._pending[delta.index] = delta if before is None else before + delta
            self._num_output_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._finished.add(delta.index)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End the request with an error for whoever reads."""
        self._error = error
        self._news.set()

    def _take(self) -> list[ChoiceDelta]:
        pending, self._pending = self._pending, {}
        return [pending[index] for index in sorted(pending)]

    async def _next_news(self) -> None:
        if self._error is None:
            await self._news.wait()
            self._news.clear()
        if self._error is not None:
            raise self._error
