"""A server in a thread of the test process: a real socket, and its engine within reach."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
from openai import OpenAI

from kv8.calibration.start_up import start_engine
from kv8.engine.engine import Engine
from kv8.options import EngineOptions
from kv8.server.app import make_app
from kv8.server.engine_thread import EngineState
from kv8.server.lifecycle import Lifecycle
from kv8.server.listener import Listener
from kv8.server.preflight import preflight
from kv8.server.run import make_state
from kv8.server.settings import SETTING_FIELDS, ServerSettings
from kv8.server.state import ServerState

_Result = TypeVar("_Result")
PATIENCE = 60.0  # seconds after which a test gives up on something that should have happened


def proven_engine(options: EngineOptions) -> Engine:
    """Return an engine that proves its bookkeeping after every step."""
    return start_engine(options, check_invariants=True)


class Served:
    """One running server.

    Attributes:
        url: where it listens.
        said: what it told whoever started it.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        make_engine: Callable[[EngineOptions], Engine] = proven_engine,
        **options: Any,
    ) -> None:
        settings = {name: options.pop(name) for name in SETTING_FIELDS.keys() & options.keys()}
        options = {"kv_cache_memory": "2MiB", **options}
        self._options = EngineOptions(model=str(folder), **options)
        self._settings = ServerSettings(**{"port": 0, "drain_timeout": PATIENCE} | settings)
        self._make_engine = make_engine
        self._listener = Listener(self._settings.host, self._settings.port)
        self._plan = preflight(self._options, self._settings)
        self._listener.open()
        self.url = self._listener.url
        self.said: list[str] = []
        self._clients: list[httpx.Client] = []
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.finished: bool | None = None
        self.failure: BaseException | None = None
        self._thread.start()
        assert self._begun.wait(PATIENCE)

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.state: ServerState = make_state(
            self._options, self._settings, self._plan, self._make_engine
        )
        self._life = Lifecycle(
            make_app(self.state),
            self.state.engine,
            self._listener,
            model=self._options.model,
            drain_timeout=self._settings.drain_timeout,
            say=self.said.append,
        )
        self._begun.set()
        try:
            self.finished = await self._life.run()
        except Exception as error:  # noqa: BLE001 - tests look at it
            self.failure = error
        finally:
            self.state.texts.close()
            await self._life.join()

    def client(self, **more: Any) -> httpx.Client:
        """Return an HTTP client of this server, closed when the server has ended."""
        client = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, **more)
        self._clients.append(client)
        return client

    def openai(self, **more: Any) -> OpenAI:
        """Return the official client, which does not try again by itself."""
        fields = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE} | more
        return OpenAI(base_url=f"{self.url}/v1", http_client=self.client(), **fields)

    def on_loop(self, function: Callable[[], _Result]) -> _Result:
        """Return what ``function`` returns, called on the server's event loop."""

        async def call() -> _Result:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(PATIENCE)

    def on_engine(self, function: Callable[[Engine], _Result]) -> _Result:
        """Return what ``function`` returns for the engine, called on its thread."""
        call = self.state.engine.call(function)
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(PATIENCE)

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait until ``condition`` holds."""
        waiting = threading.Event()
        for _ in range(int(PATIENCE / 0.01)):
            if condition():
                return
            waiting.wait(0.01)
        raise AssertionError("it did not come about")

    def until_ready(self) -> "Served":
        """Wait until the engine is loaded, or has failed to."""
        self.until(lambda: self.state.engine.state is not EngineState.LOADING)
        return self

    def blocks_in_use(self) -> int:
        """Return how many blocks running sequences hold, with the bookkeeping proven."""

        def look(engine: Engine) -> int:
            engine.check_invariants()
            return engine.cache.num_blocks - engine.cache.num_free_blocks

        return self.on_engine(look)

    def stop(self) -> None:
        """Send the first signal's equivalent, or the second's."""
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._life.stop)

    def join(self) -> None:
        """Wait until the server has ended."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server does not end"
        for client in self._clients:
            client.close()


class Gate:
    """Holds an engine's steps while it is closed, so that a test decides when work goes on.

    Attributes:
        opened: cleared to hold them.
        error: what the next step fails with, if with anything.
    """

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.error: BaseException | None = None

    def guard(self, served: Served) -> None:
        """Hold the steps of a server's engine from now on."""

        def hold(engine: Engine) -> None:
            run = engine.runner.run

            def held(step: Any) -> Any:
                assert self.opened.wait(PATIENCE)
                if self.error is not None:
                    raise self.error
                return run(step)

            engine.runner.run = held  # type: ignore[method-assign]

        served.on_engine(hold)


@contextmanager
def serving(folder: Path | str, **options: Any) -> Iterator[Served]:
    """Serve a model while the block runs; options are the engine's and the server's."""
    served = Served(folder, **options)
    try:
        yield served.until_ready()
    finally:
        served.stop()
        served.stop()
        served.join()
