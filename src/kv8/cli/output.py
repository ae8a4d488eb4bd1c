"""What all commands share: where words go. Results to stdout, everything else to stderr."""

import inspect
import json as json_module
import logging
import sys
from collections.abc import Mapping
from typing import Any

import typer

from kv8.errors import EngineError, RequestError

# What these say at level "info" explains why nothing happens for a minute.
_WAITS = ("kv8.models.builtin", "kv8.models.conversion_cache")


def output_flags() -> list[inspect.Parameter]:
    """Return the flags every command with a result has."""
    json = _flag("json", "Print the result as JSON, alone on stdout.", "--json")
    return [json, *verbosity_flags()]


def verbosity_flags() -> list[inspect.Parameter]:
    """Return the flags of a command that has no result to print."""
    return [
        _flag("verbose", "Log every decision and its reason.", "--verbose", "-v"),
        _flag("debug", "Show the trace behind an error.", "--debug"),
    ]


def _flag(name: str, text: str, *spellings: str) -> inspect.Parameter:
    option = typer.Option(False, *spellings, help=text)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=option, annotation=bool)


class _Formatter(logging.Formatter):
    """``kv8: warning: ...``, like the program's error line."""

    def format(self, record: logging.LogRecord) -> str:
        return f"kv8: {record.levelname.lower()}: {super().format(record)}"


def start_logging(output: Mapping[str, bool]) -> None:
    """Send kv8's log to stderr: warnings, and what takes long; with ``verbose`` decisions; with
    ``debug`` all of it.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    log = logging.getLogger("kv8")
    log.handlers[:] = [handler]
    level = logging.INFO if output["verbose"] else logging.WARNING
    level = logging.DEBUG if output["debug"] else level
    handler.addFilter(lambda record: record.levelno >= level or record.name in _WAITS)
    log.setLevel(min(level, logging.INFO))
    log.propagate = False


def at_terminal() -> bool:
    """Whether somebody types what is read; not where stdin is a pipe, a file, or closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_stdin() -> str:
    """Return all of standard input.

    Raises:
        RequestError: it is closed, or not UTF-8 text.
    """
    if sys.stdin is None:
        raise RequestError("stdin is closed: there is nothing to read. Pipe text in.")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not text in UTF-8: {error}.") from error


def say(text: str = "", *, newline: bool = True) -> None:
    """Print a result, or with ``newline=False`` a piece of one.

    Raises:
        EngineError: stdout takes no more (a full disk; a reader that has gone ends the program
            without a word).
    """
    try:
        typer.echo(text, nl=newline)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise EngineError(f"The result cannot be written to stdout: {error}.") from error


def note(text: str) -> None:
    """Print what accompanies a result, to stderr."""
    typer.echo(text, err=True)


def say_json(value: Any) -> None:
    """Print a result as JSON."""
    say(json_module.dumps(value, ensure_ascii=False, indent=2))
