"""A folder that appears whole or not at all: written beside its place, then renamed.

The temporary folder is locked while it is being written, and the operating system drops the lock
with the process; so what a killed process left behind is told from what another is still writing,
and the next attempt removes it.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kv8.calibration.interrupts import held_interrupts
from kv8.errors import OutputError, RequestError
from kv8.models.conversion_cache import flush

# What is written beside a folder has longer names, and file systems end at 255 bytes.
_LONGEST_NAME: Final = 200


def check_new_folder(folder: Path) -> None:
    """Check, before any work, that ``folder`` can come into being.

    Raises:
        RequestError: it exists, its name is too long, or the folder it is to stand in does not
            exist or cannot be written to.
    """
    if os.path.lexists(folder):
        raise RequestError(
            f"The output folder {folder} exists, and nothing is ever overwritten. Remove it, or "
            f"give another one."
        )
    size = len(os.fsencode(folder.name))
    if size > _LONGEST_NAME:
        raise RequestError(
            f"The output folder's name takes {size} bytes, {_LONGEST_NAME} at most are allowed: "
            f"{folder.name:.40}..."
        )
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise RequestError(f"The output folder {folder} cannot be made: {parent} is no folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RequestError(f"The output folder {folder} cannot be made: {parent} is not writable.")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder to fill; it becomes ``folder`` when the ``with`` block ends well.

    If the block fails or is interrupted, nothing is left.

    Raises:
        RequestError: as `check_new_folder`.
        OutputError: writing failed, for example because the disk is full.
    """
    check_new_folder(folder)
    target = folder.absolute()
    _remove_leftovers(target)
    partial = target.with_name(f"{_prefix(target)}{os.getpid()}")
    try:
        partial.mkdir()
        lock = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield partial
            for path in (*partial.rglob("*"), partial):
                flush(path)
            with held_interrupts():  # it is there, or it is not
                check_new_folder(folder)  # somebody may have made it meanwhile
                partial.rename(target)
                flush(target.parent)
        finally:
            os.close(lock)
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be written: {error.strerror or error}. Nothing was left behind; make "
            f"room or choose another place, and try again."
        ) from error
    finally:
        with held_interrupts():
            shutil.rmtree(partial, ignore_errors=True)


def _prefix(folder: Path) -> str:
    return f".{folder.name}.writing-"


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.parent.glob(f"{_escape(_prefix(folder))}*"):
        try:
            lock = os.open(leftover, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
        except OSError:  # somebody is at work in there
            continue
        finally:
            os.close(lock)


def _escape(text: str) -> str:
    return "".join(f"[{letter}]" if letter in "[?*" else letter for letter in text)
