"""``/tokenize`` and ``/detokenize``: what the model would read, and what its tokens say."""

from typing import Any

from fastapi import APIRouter

from kv8.engine.detokenizer import TokenDecoder
from kv8.engine.prompts import TokenizedPrompt, conversations, prompts_of
from kv8.server import tools
from kv8.server.json_body import JsonRoute
from kv8.server.protocol.errors import ApiError
from kv8.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from kv8.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    """Return the routes; they need no engine, and answer while it loads."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/tokenize", response_model_exclude_none=True)
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """Turn a prompt or a conversation into tokens, as the completion routes do."""
        state.require_model(body.model)
        return await state.texts.use(lambda tokenizer: _tokenize(state, body, tokenizer))

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """Turn tokens into text."""
        state.require_model(body.model)
        return await state.texts.use(lambda tokenizer: _detokenize(body, tokenizer))

    return routes


def _tokenize(state: ServerState, body: TokenizeRequest, tokenizer: Any) -> TokenizeResponse:
    _, tokens = _tokens_of(state, body, tokenizer)
    decoder = TokenDecoder(tokenizer)
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=state.config.max_model_len,
        tokens=tokens,
        token_strs=[decoder.decode([t]) for t in tokens] if body.return_token_strs else None,
    )


def _tokens_of(state: ServerState, body: TokenizeRequest, tokenizer: Any) -> TokenizedPrompt:
    if body.messages is None:
        return prompts_of(body.prompt, tokenizer)[0]
    return conversations(
        tools.template_messages(body.messages),
        tokenizer,
        template=state.texts.chat_template,
        add_generation_prompt=body.add_generation_prompt,
    )[0]


def _detokenize(body: DetokenizeRequest, tokenizer: Any) -> DetokenizeResponse:
    decoder = TokenDecoder(tokenizer)
    for number, token in enumerate(body.tokens):
        if not decoder.has_text(token):
            raise ApiError(
                400,
                f"tokens[{number}] is {token}, which is none of this tokenizer's.",
                param=f"tokens[{number}]",
            )
    return DetokenizeResponse(prompt=decoder.decode(body.tokens))
