"""The web application: its routes, what every request passes first, and how errors look."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from kv8._version import __version__
from kv8.errors import KV8Error
from kv8.server import chat, completions, health, models, monitoring, tokenization
from kv8.server.gate import HeadGate, KeyGate, SizeGate, error_response
from kv8.server.protocol.errors import ApiError, ErrorBody, api_error
from kv8.server.protocol.validation import validation_error
from kv8.server.state import ServerState

logger = logging.getLogger(__name__)

_ROUTERS = (chat, completions, tokenization, models, health, monitoring)


def make_app(state: ServerState) -> FastAPI:
    """Return the application that serves ``state``."""
    app = FastAPI(
        title="kv8",
        version=__version__,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name the host and scheme a proxy hides
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    for module in _ROUTERS:
        app.include_router(module.router(state))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(KV8Error, _refused)
    app.add_exception_handler(Exception, _failed)
    settings = state.settings
    # The last one added is the first a request meets.
    app.add_middleware(HeadGate)
    app.add_middleware(SizeGate, limit=int(settings.max_body_size))
    app.add_middleware(KeyGate, keys=settings.api_key)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error.errors(), error.body))


def _refused(request: Request, error: Exception) -> Response:
    told = api_error(error)
    if isinstance(error, ApiError) or not isinstance(error, HTTPException):
        return error_response(told)
    # No such route, or method.
    told.detail = f"{request.method} {request.url.path}: {told.detail.lower()}."
    return error_response(told)


def _failed(request: Request, error: Exception) -> Response:
    """Answer a bug of ours; the server logs its trace."""
    return error_response(api_error(error))
