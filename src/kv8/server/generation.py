"""What chat and text completion have in common: from a sound body to an answer on its way."""

import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from kv8.engine.prompts import TokenizedPrompt
from kv8.errors import CapacityError, EngineError, RequestError
from kv8.sampling_params import SamplingParams
from kv8.server.disconnect import ClientGoneError, while_connected
from kv8.server.mailbox import ChoiceDelta, Mailbox
from kv8.server.protocol.common import GenerationRequest
from kv8.server.protocol.errors import ApiError, api_error
from kv8.server.state import ServerState
from kv8.server.worker import Submission

_CLIENT_CLOSED = 499  # nobody reads it; access logs of other servers have the number


@dataclass(frozen=True)
class AnswerHead:
    """What every answer and every chunk of it begins with."""

    id: str
    created: int
    model: str

    def fields(self) -> dict[str, Any]:
        """Return the head as keywords of a body."""
        return {"id": self.id, "created": self.created, "model": self.model}


def answer_head(prefix: str, model: str) -> AnswerHead:
    """Return the head of a new answer; ``model`` is the name the client used."""
    return AnswerHead(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)


def sampling_params(body: GenerationRequest, **more: Any) -> SamplingParams:
    """Return what ``body`` asks of the engine; ``more`` are fields whose names differ.

    Raises:
        ApiError: a field has a value it cannot have, or two contradict each other.
    """
    try:
        return body.sampling_params(**more)
    except RequestError as error:
        raise api_error(error, fields=type(body).model_fields) from error


async def submit(
    state: ServerState,
    body: GenerationRequest,
    params: SamplingParams,
    num_prompts: int,
    prepare: Callable[[], Awaitable[Sequence[TokenizedPrompt]]],
) -> Mailbox:
    """Return the mailbox of a request the engine has accepted; whoever gets it closes it.

    Args:
        state: the server.
        body: what was asked.
        params: the same for the engine.
        num_prompts: how many prompts there are.
        prepare: turns them into tokens; called once the request has its place.

    Raises:
        ApiError: the request cannot be served, or not now.
    """
    arrived_at = time.monotonic()
    mailbox: Mailbox | None = None
    try:
        mailbox = state.engine.open(num_prompts * params.n)
        prompts = await prepare()
        _require_room(state, body, params, prompts)
        state.engine.submit(mailbox, Submission(prompts, params, body.stream, arrived_at))
        await mailbox.accepted()
    except BaseException as error:
        if mailbox is not None:
            mailbox.close()
        if isinstance(error, RequestError | EngineError):
            raise api_error(error, fields=type(body).model_fields) from error
        raise
    return mailbox


def _require_room(
    state: ServerState,
    body: GenerationRequest,
    params: SamplingParams,
    prompts: Sequence[TokenizedPrompt],
) -> None:
    """Refuse more tokens than fit after a prompt, where they were asked for and are no default."""
    asked = [
        name for name in ("max_completion_tokens", "max_tokens") if name in body.model_fields_set
    ]
    if not asked or params.max_tokens is None:
        return
    longest = state.config.max_model_len
    for _, token_ids in prompts:
        room = longest - len(token_ids)
        if 0 < room < params.max_tokens:  # without any room the engine refuses the prompt
            raise CapacityError(
                f"{asked[0]}={params.max_tokens} is more than fits after a prompt of "
                f"{len(token_ids)} tokens: a sequence has at most {longest} (max_model_len). Ask "
                f"for {room} or less, or leave it out for as many as fit."
            )


async def whole_answer(mailbox: Mailbox) -> list[ChoiceDelta]:
    """Return all choices of an answer once all have ended, and close the mailbox.

    Raises:
        RequestError: one of them failed over what was asked for.
        EngineError: one of them failed.
    """
    try:
        choices = await mailbox.rest()
    finally:
        mailbox.close()
    for choice in choices:
        require_sound(choice)
    return choices


def require_sound(choice: ChoiceDelta) -> None:
    """Raise `EngineError` if ``choice`` has ended with an error, or `RequestError`."""
    if choice.refused:
        raise RequestError(f"The request cannot be served: {choice.error}")
    if choice.finish_reason in ("error", "abort"):
        raise EngineError(f"The request failed in the engine: {choice.error or 'it was aborted'}")


async def respond(request: Request, work: Coroutine[Any, Any, Response | BaseModel]) -> Response:
    """Return the response that ``work`` makes, unless the client goes away meanwhile.

    Raises:
        ApiError: the request has a query, which no field of ours may stand in.
    """
    for name in request.query_params:
        work.close()
        raise ApiError(
            400, f"{name!a:.80} in the query is not known here. Fields belong in the body."
        )
    try:
        result = await while_connected(request.receive, work)
    except ClientGoneError:
        return Response(status_code=_CLIENT_CLOSED)
    if isinstance(result, BaseModel):
        return Response(result.model_dump_json(), media_type="application/json")
    return result
