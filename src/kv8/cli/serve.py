"""``kv8 serve MODEL``: an OpenAI-compatible server, until a signal ends it."""

import logging
import os
from typing import Any

import typer

from kv8.cli.options_view import (
    VLLM_SPELLINGS,
    ModelArgument,
    engine_flags,
    server_flags,
    with_flags,
)
from kv8.cli.output import note, start_logging, verbosity_flags
from kv8.errors import RequestError

_KEY_VARIABLE = "KV8_API_KEY"


@with_flags(
    settings=server_flags(),
    engine=engine_flags(spellings=VLLM_SPELLINGS),
    output=verbosity_flags(),
)
def serve(
    model: ModelArgument,
    *,
    settings: dict[str, Any],
    engine: dict[str, Any],
    output: dict[str, Any],
) -> None:
    """Serve a model with OpenAI's API, at http://127.0.0.1:8000.

    SIGTERM or ctrl-C finishes the requests in work and ends; a second one ends at once.
    """
    start_logging(output)
    from kv8.options import EngineOptions
    from kv8.server.settings import ServerSettings

    if not settings["api_key"] and _KEY_VARIABLE in os.environ:
        settings["api_key"] = [_key_of_the_environment()]
    server_settings = ServerSettings(**settings)
    options = EngineOptions(model=model, **engine)
    try:
        from kv8.server.run import serve as run
    except ImportError as error:
        raise RequestError(
            f"kv8 serve needs what the extra `server` brings ({error}). Install it: "
            f"pip install 'kv8[server]'."
        ) from error
    _log_the_web_server()
    code = run(options, server_settings, say=lambda line: note(f"kv8: {line}"))
    if code:
        raise typer.Exit(code)


def _key_of_the_environment() -> str:
    """Return the key; an empty one is a mistake that would open the server to everybody."""
    key = os.environ[_KEY_VARIABLE]
    if not key.strip():
        raise RequestError(
            f"The environment variable {_KEY_VARIABLE} is set, but empty. Give it the key that "
            f"clients must send, or unset it to let everybody in."
        )
    return key


def _log_the_web_server() -> None:
    """Have uvicorn's errors look like kv8's own. Its warnings are of what clients send."""
    log = logging.getLogger("uvicorn")
    log.handlers[:] = logging.getLogger("kv8").handlers
    log.setLevel(logging.ERROR)
    log.propagate = False
