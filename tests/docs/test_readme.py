"""Every fenced example in README.md and docs/ runs, and prints what the page says it prints.

``console`` blocks hold commands after ``$ `` and their output; ``python`` blocks are scripts, whose
output stands in the ``text`` block that follows directly, if there is one. ``...`` in an expected
output matches anything. Blocks marked ``console no-test`` (installation) are not run.
"""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = body.startswith("$ ")
    result = subprocess.run(
        ["bash", "-c", body[2:]] if shell else [sys.executable, "-c", body],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "COLUMNS": "120", "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, f"{name} failed:\n{result.stderr}"
    assert matches(expected, result.stdout), f"{name} printed:\n{result.stdout}"
