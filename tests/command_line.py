"""Runs ``kv8`` in this process: words in, exit code and both streams out."""

import contextlib
import io
import json
import logging
from dataclasses import dataclass
from typing import Any
from unittest import mock

from kv8.cli import main


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be JSON and nothing else."""
        return json.loads(self.out)


def kv8(*words: object, stdin: Any = "") -> Result:
    """Run ``kv8`` with ``words``; the process's logging is as before afterwards.

    ``stdin`` is a text, or an object that stands in for standard input.
    """
    out, err = io.StringIO(), io.StringIO()
    log = logging.getLogger("kv8")
    before = log.handlers[:], log.level, log.propagate
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch("sys.stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin),
        ):
            code = main([str(word) for word in words])
    finally:
        log.handlers[:], log.level, log.propagate = before
    return Result(code, out.getvalue(), err.getvalue())
