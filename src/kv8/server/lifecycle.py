"""A server's life: it listens, loads, serves, drains and ends, whatever of this is cut short.

The first SIGTERM or SIGINT ends the taking of requests, and what was accepted is finished; the
second ends that, too, with an error for whoever waits.
"""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from kv8.server.engine_thread import EngineThread
from kv8.server.listener import Listener

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_KEEP_ALIVE_SECONDS = 65  # longer than proxies keep a connection, so that they close it
_FLUSH_SECONDS = 5  # for the last bytes of answers that are complete
_THREAD_SECONDS = 5.0  # for the step that is being computed


class _WebServer(uvicorn.Server):
    """uvicorn, with the signals left to `Lifecycle`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class Lifecycle:
    """Runs one server from its first to its last moment.

    Args:
        app: what is served.
        engine: not started yet.
        listener: open.
        model: what is served, as the user named it.
        drain_timeout: seconds that accepted requests have once the server is to stop.
        say: tells whoever started the server how it goes.
    """

    def __init__(
        self,
        app: FastAPI,
        engine: EngineThread,
        listener: Listener,
        *,
        model: str,
        drain_timeout: float,
        say: Callable[[str], None],
    ) -> None:
        self._model = model
        self._engine = engine
        self._listener = listener
        self._drain_timeout = drain_timeout
        self._say = say
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._web = _WebServer(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )

    def stop(self) -> None:
        """Do what a signal does: drain, or if that is being done, end."""
        (self._stop_now if self._stop.is_set() else self._stop).set()

    async def run(self) -> bool:
        """Serve until stopped; return whether every accepted request was finished.

        Raises:
            Exception: whatever kept the engine from loading.
        """
        web = asyncio.create_task(self._web.serve(sockets=[self._listener.socket]))
        with self._signals():
            try:
                self._say(f"listening on {self._listener.url}, loading {self._model}")
                self._engine.start()
                await self._until_stopped(web, self._engine.loaded())
                if not self._stop.is_set():
                    self._say("ready")
                    await self._until_stopped(web)
                return await self._drain()
            finally:
                self._web.should_exit = True
                await web

    async def join(self) -> bool:
        """End the engine's thread; return whether it could be: nothing stops one that loads."""
        return await self._engine.stop(timeout=_THREAD_SECONDS)

    async def _until_stopped(
        self, web: "asyncio.Task[None]", *others: Coroutine[Any, Any, None]
    ) -> None:
        """Wait for the stop, for one of the others, or for a web server that ends by itself."""
        tasks = [asyncio.ensure_future(work) for work in (self._stop.wait(), *others)]
        try:
            done, _ = await asyncio.wait({web, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _cancel(*tasks)

    async def _drain(self) -> bool:
        self._engine.drain()
        if not self._engine.is_idle:
            self._say("stopping: requests in work are finished first; a second signal ends them")
        idle = asyncio.ensure_future(self._engine.idle())
        now = asyncio.ensure_future(self._stop_now.wait())
        await asyncio.wait(
            {idle, now}, timeout=self._drain_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        finished = idle.done()
        if not finished:
            self._say("stopping: requests in work are ended")
            self._engine.end_all("The server was stopped.")
            await asyncio.wait({idle}, timeout=_FLUSH_SECONDS)
        await _cancel(idle, now)
        return finished

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Have signals stop the server, where this is the thread that gets them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
