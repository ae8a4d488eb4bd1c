"""Reads the body of a request as JSON, and refuses what Python's reader would pass over in silence.

Of two members of the same name it keeps the last. Such a body is a mistake, and which of the two
was meant is not for a server to guess.
"""

import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute

from kv8.server.protocol.errors import ApiError

# No shape here has nearly as many fields; a schema's properties are members, too. Each that is
# not known becomes a finding of pydantic's, which takes a thousand times as long as its reading.
MOST_MEMBERS: Final = 4096
_CODE: Final = "invalid_json"


class JsonRoute(APIRoute):
    """A route whose body is read by `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await answer(_JsonRequest(request.scope, request.receive))

        return handler


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Return the body, read."""
        return read_json(await self.body())


def read_json(raw: bytes) -> Any:
    """Return what a body says.

    Raises:
        ApiError: it is no JSON, or says something twice.
    """
    try:
        return json.loads(raw, object_pairs_hook=_members, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos}"
    except UnicodeDecodeError:
        reason = "it is compressed, or not UTF-8"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError:  # Python's own limit
        reason = "it holds a number of too many digits"
    raise ApiError(400, f"The body is not JSON: {reason}.", code=_CODE)


def _members(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_MEMBERS:
        raise ApiError(
            400,
            f"The body holds an object of {len(pairs):,} members. Give at most {MOST_MEMBERS:,}.",
        )
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ApiError(
                400, f"{name} is given more than once. Give it once.", param=name, code=_CODE
            )
        members[name] = value
    return members


def _refuse_constant(name: str) -> None:
    raise ApiError(400, f"The body is not JSON: {name} is no number in it.", code=_CODE)
