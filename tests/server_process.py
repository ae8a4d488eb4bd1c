"""``kv8 serve`` as a process of its own, or on a test's own thread, which starts at once."""

import asyncio
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from unittest import mock

import httpx
from tests.command_line import Result, kv8

from kv8.server.lifecycle import Lifecycle

_Found = TypeVar("_Found")
Send = Callable[[signal.Signals], None]
PATIENCE = 120.0


class ServerProcess:
    """A running ``kv8 serve``.

    Attributes:
        lines: what it wrote to stderr so far.
    """

    def __init__(self, *words: object, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "kv8", "serve", *map(str, words)]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | (env or {}),
        )  # fmt: skip
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def until_said(self, pattern: str) -> re.Match[str]:
        """Wait for a line that matches and return the match."""
        with self._news:
            found = self._news.wait_for(lambda: self._find(pattern), PATIENCE)
        assert found, f"no line matches {pattern!r}: {self.lines}"
        return found

    @property
    def url(self) -> str:
        """Where it listens, once it does."""
        return self.until_said(r"listening on (\S+),")[1]

    def client(self, **more: Any) -> httpx.Client:
        """Return an HTTP client of the server."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, **more)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def _find(self, pattern: str) -> re.Match[str] | None:
        return next((m for line in self.lines if (m := re.search(pattern, line))), None)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()


@contextmanager
def server_process(*words: object, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """Run ``kv8 serve`` while the block runs; it is killed if it does not end by itself."""
    server = ServerProcess(*words, env=env)
    try:
        yield server
    finally:
        server.process.kill()
        server.wait()


def server_here(
    use: Callable[[httpx.Client, Send], _Found], *words: object
) -> tuple[Result, _Found]:
    """Run ``kv8 serve`` with ``words`` on this thread, which must be the main one, to its end.

    Args:
        use: called on another thread once the server is ready, with a client of it and a function
            that sends it a real signal; it must send one, for nothing else ends the server.

    Returns what the command left behind, and what ``use`` returned.
    """
    lives: queue.Queue[tuple[Lifecycle, asyncio.AbstractEventLoop]] = queue.Queue()
    run = Lifecycle.run

    async def noted(life: Lifecycle) -> bool:
        lives.put((life, asyncio.get_running_loop()))
        return await run(life)

    def work() -> _Found:
        life, loop = lives.get(timeout=PATIENCE)
        try:
            url = life._listener.url
            with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
                while client.get("/health").json()["status"] == "loading":
                    time.sleep(0.02)
                return use(client, lambda number: os.kill(os.getpid(), number))
        except BaseException:
            with suppress(RuntimeError):  # it has ended
                for _ in range(2):
                    loop.call_soon_threadsafe(life.stop)
            raise

    with mock.patch.object(Lifecycle, "run", noted), ThreadPoolExecutor(1) as other:
        found = other.submit(work)
        result = kv8("serve", *words)
        return result, found.result(PATIENCE)
