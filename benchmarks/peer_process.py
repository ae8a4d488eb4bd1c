"""A peer in a process of its own, seen from peers.py: started, asked, given up on, stopped."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("peer_worker.py")


class PeerError(Exception):
    """A peer died, or took too long."""


@dataclass(frozen=True)
class Peer:
    """One engine with one kind of KV cache.

    Attributes:
        name: for people.
        engine: its name in peer_worker.py.
        python: the interpreter that has it.
        settings: for the worker.
        environment: variables it needs.
        fallback: settings to try if it crashes at the start.
        most_sequences: how many it can run at once, `None` for no limit.
    """

    name: str
    engine: str
    python: str
    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    fallback: Mapping[str, Any] | None = None
    most_sequences: int | None = None

    def missing(self, module: str) -> str | None:
        """Return why ``module`` cannot be imported there, or `None` if it is installed."""
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
        try:
            done = subprocess.run([self.python, "-c", code], capture_output=True, check=False)
        except OSError as error:
            return f"{self.python} does not run ({error})"
        return f"{module} is not installed in {self.python}" if done.returncode else None

    def with_fallback(self) -> "Peer | None":
        """Return the peer with its second choice of settings."""
        if self.fallback is None:
            return None
        return replace(self, settings={**self.settings, **self.fallback}, fallback=None)


def _own_settings() -> dict[str, str]:
    """Return this process's environment without what importing kv8 set in it: each has its own."""
    return {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}


class PeerProcess:
    """A running peer.

    Args:
        peer: which.
        timeout: seconds a reply may take.

    Attributes:
        start_seconds: from the start of the process until its first token.
        version: of the engine's package.

    Raises:
        PeerError: it did not come up.
    """

    def __init__(self, peer: Peer, timeout: float) -> None:
        self.peer, self._timeout = peer, timeout
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - lives as long
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            [peer.python, str(WORKER), peer.engine, json.dumps(dict(peer.settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_own_settings() | dict(peer.environment),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.version = str(self._reply()["version"])
        self.start_seconds = time.perf_counter() - begin

    def ask(self, do: str, **arguments: Any) -> float:
        """Have something done and return the seconds it took there.

        Raises:
            PeerError: it died, or took too long; it is stopped then.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed("died") from error
        return float(self._reply()["seconds"])

    def stop(self) -> None:
        """End the process, by asking first."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _reply(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._timeout)
        except queue.Empty:
            raise self._failed(f"gave no answer in {self._timeout:.0f} s") from None
        if not line:
            raise self._failed("died")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _failed(self, how: str) -> PeerError:
        """Return the error to raise, after making sure that the process is gone."""
        if how == "died":
            try:
                how = f"died with exit code {self._process.wait(timeout=10)}"
            except subprocess.TimeoutExpired:
                how = "closed its output"
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        words = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        last = f": {words[-1][:300]}" if words else ""
        return PeerError(f"{self.peer.name} {how}{last}")


def start_peer(peer: Peer, timeout: float) -> PeerProcess:
    """Start a peer, with its second choice of settings if it crashes with the first.

    Raises:
        PeerError: it did not come up.
    """
    try:
        return PeerProcess(peer, timeout)
    except PeerError as error:
        second = peer.with_fallback()
        if second is None:
            raise
        print(f"{error}; trying {dict(peer.fallback or {})}", file=sys.stderr)
        return PeerProcess(second, timeout)
