"""What all commands share: where words go. Results to stdout, everything else to stderr."""

import inspect
import json as json_module
import logging
import sys
from collections.abc import Mapping
from typing import Any

import typer

from kv8.errors import RequestError


def output_flags() -> list[inspect.Parameter]:
    """Return the flags every command has."""
    return [
        _flag("json", "Print the result as JSON, alone on stdout.", "--json"),
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
    """Send kv8's log to stderr: warnings; with ``verbose`` decisions; with ``debug`` all of it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    log = logging.getLogger("kv8")
    log.handlers[:] = [handler]
    level = logging.INFO if output["verbose"] else logging.WARNING
    log.setLevel(logging.DEBUG if output["debug"] else level)
    log.propagate = False


def read_stdin() -> str:
    """Return all of standard input.

    Raises:
        RequestError: it is not UTF-8 text.
    """
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not text in UTF-8: {error}.") from error


def say(text: str = "") -> None:
    """Print a result."""
    typer.echo(text)


def note(text: str) -> None:
    """Print what accompanies a result, to stderr."""
    typer.echo(text, err=True)


def say_json(value: Any) -> None:
    """Print a result as JSON."""
    typer.echo(json_module.dumps(value, ensure_ascii=False, indent=2))
