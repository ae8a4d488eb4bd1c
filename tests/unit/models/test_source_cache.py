"""The cache of folders made once: whole or absent, one builder at a time, whoever dies."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kv8.errors import ModelError, SourceError
from kv8.models.conversion_cache import PROVENANCE, cache_root, cached_folder, require_space

# Builds a folder slowly, counts how often it was asked to, and says so on its output.
BUILDER = """
import sys, time
from pathlib import Path
from kv8.models.conversion_cache import cached_folder

def build(target, scratch):
    with open(sys.argv[1], "a") as builds:
        builds.write("x")
    (target / "first").write_text("one")
    (scratch / "download").write_text("big")
    print("half-way", flush=True)
    time.sleep(float(sys.argv[2]))
    (target / "second").write_text("two")

print(cached_folder("model-v1", {"source": "test"}, build), flush=True)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KV8_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start_builder(builds: Path, seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-c", BUILDER, str(builds), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def build_two_files(target: Path, scratch: Path) -> None:
    (target / "first").write_text("one")
    (target / "second").write_text("two")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("KV8_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "kv8"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "kv8"


def test_a_folder_is_built_once_and_says_where_it_came_from(cache):
    folder = cached_folder("model-v1", {"source": "test", "sha256": "ab"}, build_two_files)
    assert folder == cache / "model-v1"
    provenance = json.loads((folder / PROVENANCE).read_text())
    assert provenance == {"source": "test", "sha256": "ab", "files": {"first": 3, "second": 3}}
    assert names(cache) == {"model-v1", "model-v1.lock"}

    def must_not_run(target, scratch):
        raise AssertionError

    assert cached_folder("model-v1", {}, must_not_run) == folder


@pytest.mark.parametrize("damage", ["missing", "shorter", "no provenance", "broken provenance"])
def test_a_damaged_folder_is_built_again(cache, damage):
    folder = cached_folder("model-v1", {}, build_two_files)
    if damage == "missing":
        (folder / "second").unlink()
    elif damage == "shorter":
        (folder / "second").write_text("t")
    elif damage == "no provenance":
        (folder / PROVENANCE).unlink()
    else:
        (folder / PROVENANCE).write_text('["files"]')
    (folder / "extra").write_text("stale")
    cached_folder("model-v1", {}, build_two_files)
    assert names(folder) == {"first", "second", PROVENANCE}
    assert (folder / "second").read_text() == "two"


def test_a_failed_build_leaves_nothing(cache):
    def fail(target, scratch):
        (target / "first").write_text("one")
        raise ModelError("no such thing")

    with pytest.raises(ModelError, match="no such thing"):
        cached_folder("model-v1", {}, fail)
    assert names(cache) == {"model-v1.lock"}


def test_two_processes_build_once(cache, tmp_path):
    builds = tmp_path / "builds"
    first = start_builder(builds, seconds=0.5)
    assert first.stdout.readline() == "half-way\n"
    second = start_builder(builds, seconds=0.5)
    assert second.communicate()[0] == f"{cache / 'model-v1'}\n"
    assert first.communicate()[0] == f"{cache / 'model-v1'}\n"
    assert builds.read_text() == "x"
    assert names(cache) == {"model-v1", "model-v1.lock"}


def test_two_threads_build_once(cache):
    counts = []

    def build(target, scratch):
        counts.append(1)
        time.sleep(0.1)
        build_two_files(target, scratch)

    threads = [
        threading.Thread(target=cached_folder, args=("model-v1", {}, build)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 1
    assert names(cache / "model-v1") == {"first", "second", PROVENANCE}


def test_kill_9_half_way_costs_nothing(cache, tmp_path):
    builds = tmp_path / "builds"
    killed = start_builder(builds, seconds=60)
    assert killed.stdout.readline() == "half-way\n"
    waiting = start_builder(builds, seconds=0)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    # The one that waited for the lock gets it, tidies up, and does the work.
    assert waiting.communicate()[0] == f"half-way\n{cache / 'model-v1'}\n"
    assert names(cache) == {"model-v1", "model-v1.lock"}
    assert names(cache / "model-v1") == {"first", "second", PROVENANCE}
    assert builds.read_text() == "xx"


def test_a_build_of_another_model_is_left_alone(cache):
    cache.mkdir()
    (cache / "model-v10.partial-abc").mkdir()
    cached_folder("model-v1", {}, build_two_files)
    assert "model-v10.partial-abc" in names(cache)


def test_files_follow_the_users_umask():
    def build(target, scratch):
        (target / "first").touch(mode=0o600)

    folder = cached_folder("model-v1", {}, build)
    assert (folder / "first").stat().st_mode == (folder / PROVENANCE).stat().st_mode


class RustError(Exception):
    """Such as safetensors and tokenizers raise."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RustError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_said(cache, error):
    def fail(target, scratch):
        raise error

    with pytest.raises(SourceError, match=r"disk filled up .*model-v1.*KV8_CACHE"):
        cached_folder("model-v1", {}, fail)
    assert names(cache) == {"model-v1.lock"}


def test_too_little_space_is_said_before_the_work(tmp_path):
    with pytest.raises(SourceError, match=r"too full: about 1024\.00 TiB are needed"):
        require_space(tmp_path, 2**50)
    require_space(tmp_path, 1)


def test_a_cache_that_cannot_be_written_is_said(cache):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(SourceError, match="KV8_CACHE"):
        cached_folder("model-v1", {}, build_two_files)


def test_a_finished_folder_needs_no_writing(cache):
    folder = cached_folder("model-v1", {}, build_two_files)
    (cache / "model-v1.lock").unlink()
    os.chmod(cache, 0o500)  # noqa: PTH101
    try:
        assert cached_folder("model-v1", {}, build_two_files) == folder
        assert names(cache) == {"model-v1"}
    finally:
        os.chmod(cache, 0o700)  # noqa: PTH101
