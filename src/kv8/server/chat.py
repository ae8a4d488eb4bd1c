"""``/v1/chat/completions``: a conversation in, the model's answers out."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from kv8.engine.prompts import TokenizedPrompt, conversations
from kv8.server import structured, tools
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
from kv8.server.logprobs import chat_logprobs, prompt_logprobs
from kv8.server.mailbox import ChoiceDelta, Mailbox
from kv8.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatDelta,
    ChoiceLogprobs,
)
from kv8.server.protocol.common import usage_body
from kv8.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    """Return the route."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post(
        "/v1/chat/completions", response_model=ChatCompletion, responses=stream_responses()
    )
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await respond(request, _answer(state, body))

    return routes


async def _answer(state: ServerState, body: ChatCompletionRequest) -> Response | ChatCompletion:
    state.require_model(body.model)
    state.engine.require_ready()
    use = await tools.tool_use(body, state)
    params = sampling_params(
        body,
        max_tokens=body.most_tokens,
        logprobs=body.num_logprobs,
        **structured.sampling_options(body) | {**use.sampling_options},
    )
    messages = tools.template_messages(body.messages)

    def tokenize(tokenizer: Any) -> list[TokenizedPrompt]:
        return conversations(
            messages,
            tokenizer,
            template=state.texts.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            template_options=use.template_options,
        )

    async def prepare() -> list[TokenizedPrompt]:
        await structured.compile_form(state, params, body)
        return await state.texts.use(tokenize)

    mailbox = await submit(state, body, params, 1, prepare)
    head = answer_head("chatcmpl", body.model or state.model_name)
    if body.stream:
        return EventStream(mailbox, _chunks(head, body, use, mailbox))
    choices = await whole_answer(mailbox)
    prompt = mailbox.prompts[0]
    return ChatCompletion(
        **head.fields(),
        choices=[_choice(body, use, choice) for choice in choices],
        usage=usage_body(mailbox.usage),
        prompt_logprobs=prompt_logprobs(prompt.logprobs, body.prompt_logprobs),
        prompt_token_ids=list(prompt.token_ids) if body.return_token_ids else None,
    )


def _choice(body: ChatCompletionRequest, use: tools.ToolUse, choice: ChoiceDelta) -> ChatChoice:
    message = _MessageReader(use)
    delta = message.read(choice)
    calls = [call.whole() for call in delta.tool_calls or ()]
    return ChatChoice(
        index=choice.index,
        message=AnswerMessage(
            content=delta.content if delta.content or not calls else None,
            tool_calls=calls or None,
        ),
        logprobs=_logprobs(body, choice),
        finish_reason=message.finish_reason(choice),
        stop_reason=choice.stop_reason,
        token_ids=list(choice.token_ids) if body.return_token_ids else None,
    )


async def _chunks(
    head: AnswerHead, body: ChatCompletionRequest, use: tools.ToolUse, mailbox: Mailbox
) -> AsyncIterator[ChatChunk]:
    """Yield the chunks of a streamed answer: a role, what was said, the reason it ended."""
    readers = [_MessageReader(use) for _ in range(body.n)]
    fields = head.fields()
    for index in range(body.n):
        opening = ChatDelta(role="assistant", content="")
        yield ChatChunk(**fields, choices=[ChatChunkChoice(index=index, delta=opening)])
    prompt_told = False
    while deltas := await mailbox.next():
        for delta in deltas:
            require_sound(delta)
            chunk = ChatChunk(**fields, choices=[_chunk_choice(body, readers[delta.index], delta)])
            if not prompt_told:
                prompt = mailbox.prompts[0]
                chunk.prompt_logprobs = prompt_logprobs(prompt.logprobs, body.prompt_logprobs)
                chunk.prompt_token_ids = list(prompt.token_ids) if body.return_token_ids else None
                prompt_told = True
            yield chunk
    if body.stream_options is not None and body.stream_options.include_usage:
        yield ChatChunk(**fields, choices=[], usage=usage_body(mailbox.usage))


def _chunk_choice(
    body: ChatCompletionRequest, reader: "_MessageReader", delta: ChoiceDelta
) -> ChatChunkChoice:
    return ChatChunkChoice(
        index=delta.index,
        delta=reader.read(delta),
        logprobs=_logprobs(body, delta),
        finish_reason=reader.finish_reason(delta),
        stop_reason=delta.stop_reason,
        token_ids=list(delta.token_ids) if body.return_token_ids else None,
    )


class _MessageReader:
    """One answer as it grows: which of its text is said, and which calls tools."""

    def __init__(self, use: tools.ToolUse) -> None:
        self._tools = use.reader()

    def read(self, delta: ChoiceDelta) -> ChatDelta:
        """Return what the message gained."""
        if self._tools is None:
            return ChatDelta(content=delta.text)
        pieces = self._tools.push(delta.text)
        if delta.finish_reason is not None:
            pieces = [*pieces, *self._tools.finish()]
        calls = [call for piece in pieces for call in piece.tool_calls]
        return ChatDelta(
            content="".join(piece.content for piece in pieces), tool_calls=calls or None
        )

    def finish_reason(self, delta: ChoiceDelta) -> Any:
        """Return why the message ended, if it has, in OpenAI's words."""
        called = self._tools is not None and self._tools.called
        return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason


def _logprobs(body: ChatCompletionRequest, delta: ChoiceDelta) -> ChoiceLogprobs | None:
    if delta.logprobs is None or body.num_logprobs is None:
        return None
    return chat_logprobs(delta.token_ids, delta.logprobs, body.num_logprobs)
