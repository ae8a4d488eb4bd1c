"""What every request passes before a route sees it: the key, the size of its body, its method."""

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kv8.server.protocol.errors import ApiError
from kv8.units import format_bytes

OPEN_PATHS: Final = frozenset({"/", "/health"})
OPEN_PREFIXES: Final = ("/static/",)

# A client that is cut off while it sends may never read why, so what is too much is read on, up to
# so many times the limit, and thrown away.
_READ_ON: Final = 16


class KeyGate:
    """Lets in requests that bring a key, if any is set.

    Only the paths that tell nothing of requests are open. Keys are compared in constant time, and
    every one of them is compared.

    Args:
        app: what is behind the gate.
        keys: any of them opens.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on."""
        if scope["type"] != "http" or self._opens(scope):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            401,
            "The API key is missing or wrong. Send the server's key as a header, "
            "Authorization: Bearer KEY.",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await error_response(refusal)(scope, receive, send)

    def _opens(self, scope: Scope) -> bool:
        path: str = scope["path"]
        if not self._digests or path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class SizeGate:
    """Refuses bodies over a limit, whether their length is announced or not.

    Args:
        app: what is behind the gate.
        limit: most bytes of a body.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count what is read of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_read = 0

        async def counted() -> Message:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._limit:
                await self._discard(message, receive)
                raise ApiError(
                    413,
                    f"The body is larger than {format_bytes(self._limit)}. Send less, or raise "
                    f"the server's --max-body-size.",
                )
            return message

        await self._app(scope, counted, send)

    async def _discard(self, message: Message, receive: Receive) -> None:
        num_left = _READ_ON * self._limit
        while message.get("more_body") and num_left > 0:
            message = await receive()
            num_left -= len(message.get("body", b""))


class HeadGate:
    """Answers HEAD as GET; the web server leaves the body out.

    Args:
        app: what is behind the gate.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def error_response(error: ApiError) -> JSONResponse:
    """Return ``error`` as a response."""
    return JSONResponse(error.body(), error.status_code, headers=error.headers)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
