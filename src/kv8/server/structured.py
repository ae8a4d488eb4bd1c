"""From the form a request asks for to the one the engine knows, compiled before it gets there."""

import asyncio
from typing import Any

from kv8.errors import RequestError
from kv8.sampling_params import SamplingParams
from kv8.server.protocol.common import GenerationRequest
from kv8.server.protocol.errors import ApiError
from kv8.server.protocol.structured import (
    JsonObjectFormat,
    JsonSchemaFormat,
    TextFormat,
)
from kv8.server.state import ServerState
from kv8.structured_outputs import StructuredOutputsParams


def form_field(body: GenerationRequest) -> str | None:
    """Return which field of ``body`` asks for a form, `None` if none does.

    Raises:
        ApiError: both do.
    """
    formats = not isinstance(body.response_format, TextFormat | None)
    if formats and body.structured_outputs is not None:
        raise ApiError(
            400,
            "structured_outputs and response_format both say what form the answer has. Give one.",
            param="structured_outputs",
        )
    if formats:
        return "response_format"
    return None if body.structured_outputs is None else "structured_outputs"


def sampling_options(body: GenerationRequest) -> dict[str, Any]:
    """Return the sampling parameters that give an answer the form ``body`` asks for; often none.

    Raises:
        ApiError: two forms are asked for, or one is no form.
    """
    name = form_field(body)
    try:
        form = _form(body)
    except RequestError as error:
        raise ApiError(400, f"{name}: {error}", param=name) from None
    return {} if form is None else {"structured_outputs": form}


async def compile_form(state: ServerState, params: SamplingParams, body: GenerationRequest) -> None:
    """Make the form in ``params``, if any, ready, so that the engine need not wait for it.

    Args:
        state: the server's.
        params: of the request, which is about to be submitted.
        body: the request. A form that none of its fields asks for is that of its tools.

    Raises:
        ApiError: nobody can follow it.
        EngineUnavailableError: there is no engine now.
    """
    form = params.structured_outputs
    if form is None:
        return
    grammars = await state.engine.call(lambda engine: engine.grammars)
    try:
        await asyncio.to_thread(grammars.compile, form)
    except RequestError as error:
        name = form_field(body) or "tools"
        raise ApiError(400, f"{name}: {error}", param=name) from None


def _form(body: GenerationRequest) -> StructuredOutputsParams | None:
    match body.response_format:
        case JsonObjectFormat():
            return StructuredOutputsParams(json_object=True)
        case JsonSchemaFormat(json_schema=described):
            return StructuredOutputsParams(json=described.schema_)
    given = body.structured_outputs
    if given is None:
        return None
    return StructuredOutputsParams(
        json=given.json_,
        json_object=bool(given.json_object),
        regex=given.regex,
        choice=given.choice,
        grammar=given.grammar,
    )
