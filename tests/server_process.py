"""``kv8 serve`` as a process of its own: signals, exit codes, what it prints."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

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
