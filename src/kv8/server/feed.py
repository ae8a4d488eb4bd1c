"""One prompt of a request, on the engine thread's side: from the engine's output to updates."""

from collections.abc import Sequence
from time import perf_counter

from kv8.outputs import CompletionOutput, RequestOutput
from kv8.server.mailbox import ChoiceDelta, Mailbox, PromptReport, Update
from kv8.server.observer import FinishedPrompt, RequestObserver


class Feed:
    """Remembers what of an output was passed on.

    Args:
        mailbox: where updates go; only its identity is used here.
        prompt_index: which of the request's prompts this is.
        stream: whether what each step adds is passed on at once, or all at the end.
        observers: who is told how the request fares.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        prompt_index: int,
        *,
        stream: bool,
        observers: Sequence[RequestObserver],
    ) -> None:
        self.mailbox = mailbox
        self._prompt_index = prompt_index
        self._stream = stream
        self._observers = observers
        self._arrival = perf_counter()
        self._cursors: dict[int, _Cursor] = {}
        self._prompt_reported = False

    def take(self, output: RequestOutput) -> Update | None:
        """Return what is new in ``output``, `None` if nothing is to be passed on yet."""
        now = perf_counter()
        for completion in output.outputs:
            cursor = self._cursors.setdefault(completion.index, _Cursor())
            self._observe_tokens(cursor, len(completion.token_ids), now)
        if output.finished:
            self._observe_end(output, now)
        elif not self._stream:
            return None
        first = self._prompt_index * len(output.outputs)
        deltas = (self._cursors[c.index].delta(c, first + c.index) for c in output.outputs)
        choices = tuple(delta for delta in deltas if delta is not None)
        return Update(choices, self._report(output)) if choices else None

    def _report(self, output: RequestOutput) -> PromptReport | None:
        if self._prompt_reported:
            return None
        self._prompt_reported = True
        return PromptReport(
            self._prompt_index,
            output.prompt_token_ids,
            output.num_cached_tokens,
            output.prompt_logprobs,
        )

    def _observe_tokens(self, cursor: "_Cursor", num_tokens: int, now: float) -> None:
        if num_tokens == cursor.num_seen:
            return
        cursor.num_seen = num_tokens
        first = all(other.last_token is None for other in self._cursors.values())
        for observer in self._observers:
            if cursor.last_token is not None:
                observer.next_token(now - cursor.last_token)
            elif first:
                observer.first_token(now - self._arrival)
        cursor.last_token = now

    def _observe_end(self, output: RequestOutput, now: float) -> None:
        prompt = FinishedPrompt(
            seconds=now - self._arrival,
            num_prompt_tokens=len(output.prompt_token_ids),
            num_cached_tokens=output.num_cached_tokens,
            num_output_tokens=sum(len(c.token_ids) for c in output.outputs),
            finish_reasons=tuple(c.finish_reason or "error" for c in output.outputs),
        )
        for observer in self._observers:
            observer.finished(prompt)


class _Cursor:
    """How far one completion was seen and passed on."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.last_token: float | None = None
        self._num_tokens = 0
        self._num_characters = 0
        self._ended = False

    def delta(self, completion: CompletionOutput, index: int) -> ChoiceDelta | None:
        """Return what was not passed on yet, as choice ``index``; `None` if there is nothing."""
        if self._ended:
            return None
        text = completion.text[self._num_characters :]
        token_ids = tuple(completion.token_ids[self._num_tokens :])
        if not (text or token_ids or completion.finish_reason):
            return None
        logprobs = completion.logprobs
        delta = ChoiceDelta(
            index=index,
            text=text,
            token_ids=token_ids,
            logprobs=None if logprobs is None else tuple(logprobs[self._num_tokens :]),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            error=completion.error,
        )
        self._num_tokens = len(completion.token_ids)
        self._num_characters = len(completion.text)
        self._ended = completion.finish_reason is not None
        return delta
