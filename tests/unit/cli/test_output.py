"""Where words go: what is logged without being asked for, and what a full disk does."""

import logging
from collections.abc import Iterator

import pytest
import typer
from tests.command_line import kv8

from kv8.cli.output import start_logging

QUIET = {"json": False, "verbose": False, "debug": False}


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    log = logging.getLogger("kv8")
    before = log.handlers[:], log.level, log.propagate
    yield log
    log.handlers[:], log.level, log.propagate = before


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (QUIET, ["fetching", "careful"]),
        (QUIET | {"verbose": True}, ["fetching", "decided", "careful"]),
        (QUIET | {"debug": True}, ["fetching", "decided", "detail", "careful"]),
    ],
)
def test_what_takes_long_is_said_unasked(output, shown, log, capsys) -> None:
    """A first start fetches and converts for a minute; nobody should wonder what hangs."""
    start_logging(output)
    log.getChild("models.builtin").info("fetching")
    log.getChild("engine.engine").info("decided")
    log.getChild("engine.engine").debug("detail")
    log.getChild("engine.engine").warning("careful")
    captured = capsys.readouterr()
    assert [line.split(": ")[-1] for line in captured.err.splitlines()] == shown
    assert captured.out == ""


def test_a_result_that_cannot_be_written_is_no_bug(tiny_model, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(typer, "echo", full)
    result = kv8("plan", tiny_model(), "--json")
    assert result.code == 1
    assert "cannot be written to stdout: [Errno 28] No space left on device" in result.err
    assert "bug" not in result.err
