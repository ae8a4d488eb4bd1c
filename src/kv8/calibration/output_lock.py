"""Keeps two calibrations from writing one output: who comes second is told before it measures.

A file beside the output is locked, and holds the number of the process that locked it. The
operating system drops the lock with the process, so what a killed one left is no hindrance.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kv8.calibration.new_folder import check_new_folder
from kv8.errors import OutputError, RequestError
from kv8.scales.storage import NO_ROOM


@contextmanager
def locked_output(folder: Path) -> Iterator[None]:
    """Have the output ``folder`` to oneself inside the ``with`` block.

    Raises:
        RequestError: another process is at work on it, or has just finished it; or no file can be
            made beside it, so the folder could not be made either.
        OutputError: the same, because the disk is full.
    """
    path = folder.absolute().with_name(f".{folder.name}.lock")
    lock = _lock(path, folder)
    try:
        check_new_folder(folder)  # whoever had the lock before may have made it
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # while it is locked: see _lock
        os.close(lock)


def _lock(path: Path, folder: Path) -> int:
    """Return the descriptor of the locked file ``path``, with this process's number in it."""
    try:
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                number = os.pread(lock, 32, 0)
                os.close(lock)
                raise _in_use(folder, number) from None
            # Its last owner may have removed it in between; then there is another, or none.
            if _is_at(path, lock):
                break
            os.close(lock)
        try:
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
        except OSError:
            path.unlink(missing_ok=True)
            os.close(lock)
            raise
    except OSError as error:
        fault = OutputError if error.errno in NO_ROOM else RequestError
        raise fault(
            f"The output folder {folder} cannot be made: its place takes no new file "
            f"({error.strerror or error}). Choose another place."
        ) from error
    return lock


def _is_at(path: Path, lock: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(lock))
    except FileNotFoundError:
        return False


def _in_use(folder: Path, number: bytes) -> RequestError:
    who = f"process {number.decode()}" if number.isdigit() else "another process"
    return RequestError(
        f"The output folder {folder} is being made by another calibration ({who}). Wait for it, "
        f"end it, or give another output folder."
    )
