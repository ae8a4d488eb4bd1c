"""Server-sent events: an answer while it grows."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kv8.server.disconnect import ClientGoneError, while_connected
from kv8.server.mailbox import Mailbox
from kv8.server.protocol.errors import api_error

logger = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends a request's events as they come, and closes its mailbox whatever happens.

    An error after the first byte cannot change the status any more: it is the last event, in the
    shape of any other error, and no ``[DONE]`` follows.

    Args:
        mailbox: of the request.
        events: what is sent.
    """

    media_type = "text/event-stream"

    def __init__(self, mailbox: Mailbox, events: AsyncIterator[BaseModel]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._mailbox = mailbox
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or as much as the client stays for."""
        try:
            await while_connected(receive, self._send_all(send))
        except (ClientGoneError, OSError):
            logger.debug("A client went away before its answer was complete.")
        finally:
            self._mailbox.close()

    async def _send_all(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        last = _DONE
        try:
            async for event in self._events:
                await self._send(send, _frame(event.model_dump_json()))
        except OSError:
            raise
        except Exception as error:
            failure = api_error(error)
            if failure.status_code >= 500:
                logger.error("A streamed answer failed: %s", error, exc_info=error)
            last = _frame(json.dumps(failure.body(), ensure_ascii=False))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send(self, send: Send, frame: bytes) -> None:
        await send({"type": "http.response.body", "body": frame, "more_body": True})
        await asyncio.sleep(0)  # a lost connection is noticed between two frames, not after all


def _frame(data: str) -> bytes:
    # JSON has no line breaks of its own, so one event is one line.
    return f"data: {data}\n\n".encode()


def stream_responses() -> dict[int | str, dict[str, Any]]:
    """Return how a route that may stream says so in its description."""
    # Without a schema: OpenAPI 3.1 has none for events, and readers differ over what one is of.
    return {200: {"content": {EventStream.media_type: {}}}}
