"""``/health``: whether the server serves."""

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from kv8.server.engine_thread import EngineState
from kv8.server.state import ServerState


class Health(BaseModel):
    """The server's state; HTTP says 200 for ``ready`` and 503 for every other."""

    status: Literal["loading", "ready", "draining", "failed"]
    reason: str | None = Field(None, description="What failed.")


def router(state: ServerState) -> APIRouter:
    """Return the route; it needs no key, and waits for nothing."""
    routes = APIRouter()

    @routes.get("/health", responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        """Say whether requests are served."""
        if state.engine.state is not EngineState.READY:
            response.status_code = 503
        return Health(status=state.engine.state.value, reason=state.engine.failure)

    return routes
