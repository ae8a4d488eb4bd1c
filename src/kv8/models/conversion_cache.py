"""A cache of folders that are made once: whole or absent, whoever makes them and however it ends.

A folder is built under a temporary name beside its place and renamed when complete, under a lock
that the operating system drops with the process. Two processes never build the same folder; what a
killed one left is removed by the next.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kv8.errors import SourceError
from kv8.units import format_bytes

logger = logging.getLogger(__name__)

PROVENANCE = "kv8_source.json"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_REMEDY = "Free some space there and make it writable, or set KV8_CACHE to another folder."


def cache_root() -> Path:
    """Return the cache folder: ``$KV8_CACHE``, else ``$XDG_CACHE_HOME/kv8``, else ~/.cache/kv8."""
    if own := os.environ.get("KV8_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kv8"


def cached_folder(
    name: str,
    provenance: Mapping[str, Any],
    build: Callable[[Path, Path], None],
) -> Path:
    """Return the cached folder ``name``, building it first if it is absent or damaged.

    Args:
        name: names the folder and everything that decides its content: other content, other name.
        provenance: kept in the folder, for whoever wonders where it came from.
        build: called as ``build(target, scratch)``; fills the empty folder ``target`` and may use
            ``scratch``, which is removed afterwards.

    Raises:
        SourceError: the cache cannot be written, or the disk is too full.
    """
    folder = cache_root() / name
    if _is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{name}.lock"), name):
            if not _is_complete(folder):
                _build(folder, provenance, build)
    except Exception as error:
        if (explained := _explain(error, folder)) is None:
            raise
        raise explained from error
    return folder


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise `SourceError` unless ``num_bytes`` are free on the disk of the existing ``folder``."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise SourceError(
            f"The disk of {folder.parent.parent} is too full: about {format_bytes(num_bytes)} are "
            f"needed, {format_bytes(free)} are free. {_REMEDY}"
        )


def _build(
    folder: Path,
    provenance: Mapping[str, Any],
    build: Callable[[Path, Path], None],
) -> None:
    # The lock is ours, so whoever made these is gone.
    for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        target = scratch / "result"
        target.mkdir()
        build(target, scratch)
        sizes = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
        seal = target / PROVENANCE
        seal.write_text(json.dumps({**provenance, "files": sizes}, indent=2), encoding="utf-8")
        for path in target.iterdir():
            # safetensors makes files for their owner alone; the rest follow the user's umask.
            path.chmod(seal.stat().st_mode)
            flush(path)
        flush(target)
        if folder.exists():
            shutil.rmtree(folder)
        target.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_complete(folder: Path) -> bool:
    """Whether ``folder`` has its provenance and every file in it has the size it was made with."""
    try:
        sizes = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def flush(path: Path) -> None:
    """Write ``path`` through to the disk, so that a rename never outlives what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    # The file stays: removing it would let two processes lock two files of one name.
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is preparing %s; waiting for it", name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _explain(error: Exception, folder: Path) -> SourceError | None:
    """Return what to tell the user where the file system is at fault, else `None`."""
    full = f"os error {errno.ENOSPC}" in str(error)
    if full or (isinstance(error, OSError) and error.errno in _NO_SPACE):
        return SourceError(f"The disk filled up while {folder} was made. {_REMEDY}")
    if isinstance(error, OSError):
        return SourceError(f"{folder} cannot be made in the cache ({error}). {_REMEDY}")
    return None
