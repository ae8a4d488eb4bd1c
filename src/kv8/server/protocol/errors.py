"""Errors as OpenAI's clients read them: ``{"error": {"message", "type", "param", "code"}}``."""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException

from kv8.errors import KV8Error, RequestError
from kv8.server.refusals import EngineUnavailableError, QueueFullError

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
}
# Seconds after which a server that is loading may be ready; one that stops may have a successor.
_RETRY_UNAVAILABLE = "5"
_LEADING_PLACE = re.compile(r"(?P<field>[a-z][a-z_]*)(\[\d+\]|\.\w+)*(?=[ :=])")


class ErrorContent(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorContent


class ApiError(HTTPException):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for the person who must act.
        param: the field concerned.
        code: a word for programs, if OpenAI has one.
        headers: to send along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, detail=message, headers=dict(headers or {}))
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the error as a body."""
        kind = _TYPES.get(HTTPStatus(self.status_code), "invalid_request_error")
        message, param = _sendable(self.detail), self.param and _sendable(self.param)
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


def api_error(error: Exception, *, fields: Mapping[str, Any] | None = None) -> ApiError:
    """Return the answer to a request that ended with ``error``.

    Args:
        error: what was raised.
        fields: names a message may begin with, which then is the field it is about.
    """
    message = str(error) or type(error).__name__
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case QueueFullError():
            headers = {"retry-after": str(error.retry_after)}
            return ApiError(429, message, code="queue_full", headers=headers)
        case EngineUnavailableError():
            headers = {"retry-after": _RETRY_UNAVAILABLE}
            return ApiError(503, message, headers=headers)
        case RequestError():
            return ApiError(400, message, param=field_of(message, fields or {}))
        case KV8Error():
            return ApiError(500, message)
        case _:
            return ApiError(500, f"kv8 failed on this request ({type(error).__name__}).")


def _sendable(text: str) -> str:
    """Return ``text`` with what is no text in UTF-8 (it quotes the client) spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def field_of(message: str, fields: Mapping[str, Any]) -> str | None:
    """Return the place in one of ``fields`` that ``message`` begins with, if it does."""
    found = _LEADING_PLACE.match(message)
    return found[0] if found is not None and found["field"] in fields else None
