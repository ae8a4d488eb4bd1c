"""The program ``kv8``: its commands, and how an error ends it.

Exit codes: 0 done, 1 the work failed, 2 the request was wrong, 130 interrupted, 143 terminated. An
error is one line on stderr; ``--debug`` adds the trace.
"""

import re
import sys
import traceback
from collections.abc import Sequence

import typer

from kv8._version import __version__
from kv8.calibration.interrupts import TERMINATED, Terminated
from kv8.cli.argv import given_words, normalise
from kv8.cli.bench import LIST_FLAGS as BENCH_LIST_FLAGS
from kv8.cli.bench import make_bench
from kv8.cli.calibrate import calibrate
from kv8.cli.chat import chat
from kv8.cli.demo import demo
from kv8.cli.generate import generate
from kv8.cli.inspect import inspect
from kv8.cli.options_view import LIST_FLAGS as ENGINE_LIST_FLAGS
from kv8.cli.plan import plan
from kv8.cli.serve import serve
from kv8.errors import KV8Error

LIST_FLAGS = ENGINE_LIST_FLAGS | BENCH_LIST_FLAGS
_INTERRUPTED = 130  # as shells say it: 128 and the number of SIGINT

# typer's own errors, wherever the installed version keeps them.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kv8 {__version__}")
        raise typer.Exit


def make_app() -> typer.Typer:
    """Return the program with all its commands."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def _program(
        version: bool = typer.Option(
            False, "--version", callback=_show_version, is_eager=True, help="Show the version."
        ),
    ) -> None:
        """Run language models with a quantized KV cache that says what it stores and costs."""

    for command in (generate, chat, serve, plan, inspect, calibrate, demo):
        app.command()(command)
    app.add_typer(make_bench(), name="bench")
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kv8`` with ``argv`` (default: the process's own) and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    command = typer.main.get_command(make_app())
    try:
        words = normalise(argv, flags=_all_flags(command), lists=LIST_FLAGS)
        with given_words(argv):
            code = int(command.main(words, prog_name="kv8", standalone_mode=False) or 0)
        return _interrupted() if code == _INTERRUPTED else code
    except KV8Error as error:
        return _fail(argv, str(error), error.exit_code)
    except _UsageError as error:
        return _fail(argv, _usage_message(error, argv), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except Terminated:
        print("kv8: terminated", file=sys.stderr)  # noqa: T201
        return TERMINATED
    except PermissionError as error:
        where = error.filename or "A file"
        return _fail(argv, f"{where}: permission denied. This user may not read or write it.", 2)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of stdout has gone; nothing is left to say
        return 1
    except Exception as error:  # noqa: BLE001 - the last line of defence of a program
        kind = type(error).__name__
        return _fail(argv, f"{kind}: {error} (this is a bug in kv8; --debug shows where)", 1)


def _fail(argv: Sequence[str], message: str, code: int) -> int:
    if "--debug" in argv:
        traceback.print_exc()
    one_line = " ".join(message.split())
    print(f"kv8: error: {one_line}", file=sys.stderr)  # noqa: T201 - this is the program's voice
    return code


def _interrupted() -> int:
    print("kv8: interrupted", file=sys.stderr)  # noqa: T201
    return _INTERRUPTED


def _usage_message(error: Exception, argv: Sequence[str]) -> str:
    message: str = error.format_message()  # type: ignore[attr-defined]
    if (bad := re.match(r"Invalid value for '(--[\w-]+)'", message)) is not None:
        message = f"{message.rstrip('.')}: {_value_of(bad[1], argv)!r}."
    given = {word.replace("_", "-") for word in argv}
    if message.startswith("Missing argument") and (listed := sorted(given & LIST_FLAGS)):
        message += (
            f" ({listed[0]} takes every word up to the next flag: put the arguments before it)"
        )
    command = getattr(getattr(error, "ctx", None), "command_path", "kv8")
    return f"{message} Try '{command} --help'."


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    """Return the last value given for ``flag``; typer's messages leave it out."""
    value = None
    for word, following in zip(argv, [*argv[1:], None], strict=True):
        name, equals, attached = word.partition("=")
        if name.replace("_", "-") == flag:
            value = attached if equals else following
    return value


def _all_flags(command: object) -> set[str]:
    own = {
        flag
        for parameter in getattr(command, "params", ())
        for flag in (*parameter.opts, *parameter.secondary_opts)
        if flag.startswith("--")
    }
    return own.union(*map(_all_flags, getattr(command, "commands", {}).values()))
