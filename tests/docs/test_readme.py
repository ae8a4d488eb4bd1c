"""Every fenced example in README.md and docs/ runs, and prints what the page says it prints.

``console`` blocks hold commands after ``$ `` and their output; ``python`` blocks are scripts, whose
output stands in the ``text`` block that follows directly, if there is one. ``...`` in an expected
output matches anything. Blocks marked ``console no-test`` (installation) are not run.
"""

import doctest
import os
import re
import shlex
import subprocess
import sys
from contextlib import chdir
from importlib.metadata import entry_points
from pathlib import Path
from unittest import mock

import pytest
from tests.command_line import kv8

from kv8.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", re.S | re.M)


def examples() -> list[tuple[str, str, str]]:
    """Return (name, command or script, expected output) of every example."""
    found = []
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text()):
            language, body, output = match.groups()
            line = page.read_text()[: match.start()].count("\n") + 1
            name = f"{page.relative_to(ROOT).as_posix()}:{line}"
            if language == "python":
                found.append((name, body, output or "..."))
            for command in re.split(r"^\$ ", body, flags=re.M)[1:] if language == "console" else ():
                text, _, expected = command.replace("\\\n", "").partition("\n")
                found.append((f"{name} {text}", f"$ {text}", expected or "..."))
    return found


def matches(expected: str, printed: str) -> bool:
    """Compare with ``...`` as a wildcard and runs of blanks as one."""
    squeeze = [re.sub(r"[ \t]+", " ", text).strip() for text in (expected, printed)]
    flags = doctest.ELLIPSIS
    return doctest.OutputChecker().check_output(squeeze[0], squeeze[1], flags)


@pytest.mark.model
@pytest.mark.parametrize(("name", "body", "expected"), examples(), ids=lambda value: value[:60])
def test_example(name: str, body: str, expected: str, tmp_path: Path) -> None:
    code, out, err = run_command(body, tmp_path) if body.startswith("$ ") else run(body, tmp_path)
    assert code == 0, f"{name} failed:\n{err}"
    assert matches(expected, out), f"{name} printed:\n{out}"


def run(script: str, folder: Path) -> tuple[int, str, str]:
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


def run_command(line: str, folder: Path) -> tuple[int, str, str]:
    """Run a command as its program does, but here, where all it imports is imported already."""
    program, *words = shlex.split(line[2:])
    assert program == "kv8"
    with chdir(folder), mock.patch.dict(os.environ, COLUMNS="120"):
        result = kv8(*words)
    return result.code, result.out, result.err


def test_the_program_is_what_the_examples_run() -> None:
    [program] = entry_points(group="console_scripts", name="kv8")
    assert program.load() is main
