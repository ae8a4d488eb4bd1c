"""What the server says of itself at one moment: one look, for /metrics and /v1/kv_cache alike."""

import time
from contextlib import suppress
from dataclasses import dataclass

from kv8.engine.snapshot import EngineSnapshot, planned_snapshot, take_snapshot
from kv8.server.engine_thread import EngineState
from kv8.server.refusals import EngineUnavailableError
from kv8.server.state import ServerState


@dataclass(frozen=True)
class Observation:
    """One moment of a server.

    Attributes:
        model: the name answers carry.
        state: what the server can do for a request that comes now.
        failure: what failed, once ``state`` is ``FAILED``.
        uptime: seconds since the server started.
        engine: the engine's counts; before there is an engine what is planned, after a failure what
            was last seen of it.
    """

    model: str
    state: EngineState
    failure: str | None
    uptime: float
    engine: EngineSnapshot


class Observer:
    """Looks at a server, in whatever state it is.

    Args:
        state: the server.
    """

    def __init__(self, state: ServerState) -> None:
        self._server = state
        self._last = planned_snapshot(state.config)
        self._started = time.monotonic()

    async def look(self) -> Observation:
        """Return what can be seen now; waits for the step that is being computed."""
        engine = self._server.engine
        with suppress(EngineUnavailableError):  # loading, or failed: its state says so
            self._last = await engine.call(take_snapshot)
        return Observation(
            model=self._server.model_name,
            state=engine.state,
            failure=engine.failure,
            uptime=time.monotonic() - self._started,
            engine=self._last,
        )
