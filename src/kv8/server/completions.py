"""``/v1/completions``: prompts in, what follows them out."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from kv8.engine.detokenizer import TokenDecoder
from kv8.engine.prompts import TokenizedPrompt, prompts_of
from kv8.server import structured
from kv8.server.event_stream import EventStream, stream_responses
from kv8.server.generation import (
    AnswerHead,
    answer_head,
    require_sound,
    respond,
    sampling_params,
    submit,
    whole_answer,
)
from kv8.server.json_body import JsonRoute
from kv8.server.logprobs import CompletionReporter, prompt_logprobs
from kv8.server.mailbox import ChoiceDelta, Mailbox, TokenLogprobs
from kv8.server.protocol.common import usage_body
from kv8.server.protocol.completions import Completion, CompletionChoice, CompletionRequest
from kv8.server.state import ServerState


@dataclass(frozen=True)
class Echo:
    """What a choice begins with: its prompt's text, and the text of the prompt's first token."""

    text: str
    first_token: str


def router(state: ServerState) -> APIRouter:
    """Return the route."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/v1/completions", response_model=Completion, responses=stream_responses())
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts."""
        return await respond(request, _answer(state, body))

    return routes


async def _answer(state: ServerState, body: CompletionRequest) -> Response | Completion:
    state.require_model(body.model)
    prompt_reports = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_reports = max(prompt_reports or 0, body.logprobs)
    params = sampling_params(
        body,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_reports,
        **structured.sampling_options(body),
    )
    prompts = body.prompts
    echoes: list[Echo | None] = [None] * len(prompts)

    def tokenize(tokenizer: Any) -> list[TokenizedPrompt]:
        tokenized = prompts_of(prompts, tokenizer)
        if body.echo:
            echoes[:] = [_echo_of(prompt, TokenDecoder(tokenizer)) for prompt in tokenized]
        return tokenized

    async def prepare() -> list[TokenizedPrompt]:
        await structured.compile_form(state, params, body)
        return await state.texts.use(tokenize)

    mailbox = await submit(state, body, params, len(prompts), prepare)
    head = answer_head("cmpl", body.model or state.model_name)
    teller = _Teller(body, mailbox, echoes)
    if body.stream:
        return EventStream(mailbox, _chunks(head, body, teller, mailbox))
    choices = await whole_answer(mailbox)
    return Completion(
        **head.fields(),
        choices=[teller.tell(choice) for choice in choices],
        usage=usage_body(mailbox.usage),
    )


def _echo_of(prompt: TokenizedPrompt, decoder: TokenDecoder) -> Echo:
    text, token_ids = prompt
    known = [token for token in token_ids if decoder.has_text(token)]
    return Echo(decoder.decode(known) if text is None else text, decoder.decode(known[:1]))


async def _chunks(
    head: AnswerHead, body: CompletionRequest, teller: "_Teller", mailbox: Mailbox
) -> AsyncIterator[Completion]:
    """Yield the chunks of a streamed answer."""
    fields = head.fields()
    while deltas := await mailbox.next():
        for delta in deltas:
            require_sound(delta)
            yield Completion(**fields, choices=[teller.tell(delta)])
    if body.stream_options is not None and body.stream_options.include_usage:
        yield Completion(**fields, choices=[], usage=usage_body(mailbox.usage))


class _Teller:
    """Turns what the engine made into choices; the first piece of each brings its prompt along.

    Args:
        body: what was asked.
        mailbox: of the request.
        echoes: of each prompt, what a choice begins with.
    """

    def __init__(
        self, body: CompletionRequest, mailbox: Mailbox, echoes: list[Echo | None]
    ) -> None:
        self._body = body
        self._mailbox = mailbox
        self._echoes = echoes
        self._reporters: dict[int, CompletionReporter] = {}

    def tell(self, delta: ChoiceDelta) -> CompletionChoice:
        """Return what one choice gained."""
        body, prompt_number = self._body, delta.index // self._body.n
        first = delta.index not in self._reporters
        reporter = self._reporters.setdefault(delta.index, CompletionReporter(body.logprobs or 0))
        choice = CompletionChoice(
            index=delta.index,
            text=delta.text,
            finish_reason=delta.finish_reason,  # type: ignore[arg-type]  # sound: checked before
            stop_reason=delta.stop_reason,
            token_ids=list(delta.token_ids) if body.return_token_ids else None,
        )
        token_ids: Sequence[int] = delta.token_ids
        reports: Sequence[TokenLogprobs | None] | None = delta.logprobs
        if first:
            prompt, echo = self._mailbox.prompts[prompt_number], self._echoes[prompt_number]
            if body.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs(prompt.logprobs, body.prompt_logprobs)
            if body.return_token_ids:
                choice.prompt_token_ids = list(prompt.token_ids)
            if echo is not None:
                choice.text = echo.text + choice.text
                if reports is not None and prompt.logprobs is not None:
                    token_ids = (*prompt.token_ids, *token_ids)
                    reports = (*prompt.logprobs, *reports)
                    reporter.first_token = echo.first_token
        if reports is not None:
            choice.logprobs = reporter.report(choice.text, token_ids, reports)
        return choice
