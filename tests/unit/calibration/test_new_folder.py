"""A folder appears whole or not at all."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kv8.calibration.new_folder import check_new_folder, new_folder
from kv8.errors import OutputError, RequestError


def fill(folder: Path, error: type[BaseException] | None = None) -> None:
    """Write a new folder, and fail in the middle if there is an error to fail with."""
    with new_folder(folder) as partial:
        (partial / "a.txt").write_text("a")
        if error is not None:
            raise error


def test_it_appears_with_all_its_files_and_ordinary_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with new_folder(folder) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "a.txt").write_text("a")
        assert not folder.exists()
        assert partial.parent == tmp_path  # the same disk, so that a rename is enough
    assert (folder / "inner" / "a.txt").read_text() == "a"
    (tmp_path / "plain").mkdir()
    assert folder.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"out", "plain"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_or_an_interrupt_leaves_nothing(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        fill(tmp_path / "out", error)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_flush_or_rename_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fsync", "rename"):

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(f"os.{name}", fail)
            patch.setattr("pathlib.Path.rename", fail)
            with pytest.raises(OutputError, match=r"out cannot be written: No space left"):
                fill(tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_exists_is_never_touched(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "out"
    if kind == "folder":
        folder.mkdir()
    elif kind == "file":
        folder.write_text("mine")
    else:
        folder.symlink_to("nowhere")
    with pytest.raises(RequestError, match=r"out exists, and nothing is ever overwritten"):
        check_new_folder(folder)
    with pytest.raises(RequestError, match="exists"), new_folder(folder):
        raise AssertionError("the block must not run")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_made_meanwhile_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(RequestError, match="exists"), new_folder(folder):
        folder.mkdir()
    assert list(tmp_path.iterdir()) == [folder]


def test_a_place_that_cannot_be_written_to_is_refused_early(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none is no folder"):
        check_new_folder(tmp_path / "none" / "out")
    with pytest.raises(RequestError, match=r"takes 303 bytes, 200 at most are allowed: ẅ"):
        check_new_folder(tmp_path / ("ẅ" * 101))
    check_new_folder(tmp_path / ("w" * 200))
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"file is no folder"):
        check_new_folder(tmp_path / "file" / "out")


KILLED = """
    import os, signal
    from pathlib import Path
    from kv8.calibration.new_folder import new_folder
    with new_folder(Path("out[1]")) as partial:
        (partial / "a.txt").write_text("a")
        print("writing", flush=True)
        {then}
"""


def start(tmp_path: Path, then: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(KILLED).format(then=then)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def test_a_killed_writer_leaves_no_output_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    killed = start(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.wait() == -signal.SIGKILL
    killed.communicate()
    [leftover] = tmp_path.iterdir()
    assert leftover.name.startswith(".out[1].writing-")
    with new_folder(tmp_path / "out[1]") as partial:
        (partial / "b.txt").write_text("b")
    assert [path.name for path in tmp_path.iterdir()] == ["out[1]"]


def test_another_writer_at_work_is_left_alone(tmp_path: Path) -> None:
    other = start(tmp_path, "input()")
    assert other.stdout is not None
    assert other.stdout.readline() == "writing\n"
    with new_folder(tmp_path / "out[1]"):
        pass
    assert any(path.name.startswith(".out[1].writing-") for path in tmp_path.iterdir())
    other.communicate("\n")  # finds the folder there, refuses, and removes its own
    assert other.returncode != 0
    assert [path.name for path in tmp_path.iterdir()] == ["out[1]"]
