"""Two calibrations into one output: the second is told at once, and a dead one is no hindrance."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv8.calibration.output_lock import locked_output
from kv8.errors import OutputError, RequestError

HOLDS = """
from pathlib import Path
from kv8.calibration.output_lock import locked_output
with locked_output(Path("out")):
    print("locked", flush=True)
    input()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_is_refused_with_the_first_ones_number(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    told = rf"{tmp_path / 'out'} is being made by another calibration \(process {other.pid}\)"
    with pytest.raises(RequestError, match=told), locked_output(tmp_path / "out"):
        pytest.fail("it is not ours")
    with locked_output(tmp_path / "elsewhere"):
        pass
    other.communicate("\n")  # it ends well, and removes its file
    assert other.returncode == 0
    assert list(tmp_path.iterdir()) == []
    with locked_output(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_one_left_is_no_hindrance(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    other.kill()
    other.wait()
    assert (tmp_path / ".out.lock").read_text() == str(other.pid)
    with locked_output(tmp_path / "out"):
        assert (tmp_path / ".out.lock").read_text() == str(os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_just_removed_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last owner ends between our opening the file and our locking it."""
    real, opened = os.open, []

    def opening(path: Path, *arguments: int) -> int:
        descriptor = real(path, *arguments)
        if not opened:
            path.unlink()
        opened.append(descriptor)
        return descriptor

    monkeypatch.setattr("os.open", opening)
    with locked_output(tmp_path / "out"):
        assert len(opened) == 2
        assert (tmp_path / ".out.lock").exists()


def test_a_folder_made_meanwhile_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(RequestError, match="exists"), locked_output(tmp_path / "out"):
        pytest.fail("there is nothing to do")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_place_that_takes_no_files_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = r"/proc/out cannot be made: .*\(No such file"
    with pytest.raises(RequestError, match=told), locked_output(Path("/proc/out")):
        pytest.fail("nothing can be written there")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    with pytest.raises(OutputError, match="No space left"), locked_output(tmp_path / "out"):
        pytest.fail("nothing can be written there")
    assert list(tmp_path.iterdir()) == []
