"""Work for a client that may go away: what nobody waits for any more ends at once."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

_Result = TypeVar("_Result")


class ClientGoneError(Exception):
    """The client has closed the connection; there is nobody to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return what ``work`` returns; cancel it when the client goes away.

    Args:
        receive: of the request, whose body has been read.
        work: what is done for it.

    Raises:
        ClientGoneError: the client went away first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, watching):
            await _cancelled(task)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: "asyncio.Future[Any]") -> None:
    """Cancel ``task`` and wait until it has ended; what it raises is of no interest."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
