"""One prompt of a request, on the engine thread's side: from the engine's output to updates."""

from kv8.outputs import CompletionOutput, RequestOutput
from kv8.server.mailbox import ChoiceDelta, Mailbox, PromptReport, Update


class Feed:
    """Remembers what of an output was passed on.

    Args:
        mailbox: where updates go; the engine's thread only carries it.
        prompt_index: which of the request's prompts this is.
        stream: whether what each step adds is passed on at once, or all at the end.
    """

    def __init__(self, mailbox: Mailbox, prompt_index: int, *, stream: bool) -> None:
        self.mailbox = mailbox
        self._prompt_index = prompt_index
        self._stream = stream
        self._cursors: dict[int, _Cursor] = {}
        self._prompt_reported = False

    def take(self, output: RequestOutput) -> Update | None:
        """Return what is new in ``output``, `None` if nothing is to be passed on yet."""
        if not (self._stream or output.finished):
            return None
        first = self._prompt_index * len(output.outputs)
        choices: list[ChoiceDelta] = []
        for completion in output.outputs:
            cursor = self._cursors.setdefault(completion.index, _Cursor())
            delta = cursor.take(completion, first + completion.index)
            if delta is not None:
                choices.append(delta)
        return Update(tuple(choices), self._prompt_report(output)) if choices else None

    def _prompt_report(self, output: RequestOutput) -> PromptReport | None:
        """Return the report on the prompt, once: it is complete when the first token is there."""
        if self._prompt_reported:
            return None
        self._prompt_reported = True
        return PromptReport(
            index=self._prompt_index,
            text=output.prompt,
            token_ids=output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
            logprobs=output.prompt_logprobs,
        )


class _Cursor:
    """How far one completion was passed on."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_characters = 0
        self._ended = False

    def take(self, completion: CompletionOutput, index: int) -> ChoiceDelta | None:
        """Return what was not passed on yet, as choice ``index``; `None` if there is nothing."""
        text = completion.text[self._num_characters :]
        token_ids = tuple(completion.token_ids[self._num_tokens :])
        if self._ended or not (text or token_ids or completion.finish_reason):
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
            refused=completion.refused,
        )
        self._num_tokens = len(completion.token_ids)
        self._num_characters = len(completion.text)
        self._ended = completion.finish_reason is not None
        return delta
