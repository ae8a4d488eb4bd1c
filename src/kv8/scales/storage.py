"""Writes files whole or not at all, and says of a disk that takes no more what a user must know.

Every failure is an `OSError` whose text names the file, the bytes it takes and the bytes there are;
whoever knows which folder the user asked for makes an `kv8.errors.OutputError` of it.
"""

import errno
import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kv8.units import format_bytes

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write ``pieces`` to ``path``, through to the disk; an existing file is replaced.

    They are written beside ``path``, which is renamed then: no reader ever sees half a file, and
    after a failure the old one is still there.

    Raises:
        OSError: it cannot be written; see `explained_failures`.
    """
    views = [memoryview(piece) for piece in pieces]
    temporary = path.with_name(f"{temporary_prefix(path)}{os.getpid()}.tmp")
    try:
        with explained_failures(path, sum(view.nbytes for view in views)):
            with temporary.open("wb") as file:
                for view in views:
                    file.write(view)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def temporary_prefix(path: Path) -> str:
    """Return how the names begin under which `write_whole` writes ``path`` at first."""
    return f".{path.name}.writing-"


@contextmanager
def explained_failures(path: Path, needed: int | None = None) -> Iterator[None]:
    """Let an `OSError` of the block say that it is ``path`` which could not be written, and why.

    Args:
        path: the file, by the name it is to have in the end; its folder is left to the caller.
        needed: bytes it takes, if that is known.

    Raises:
        OSError: the block raised one; its ``strerror`` is the explanation.
    """
    try:
        yield
    except OSError as error:
        takes = "" if needed is None else f" takes {format_bytes(needed)}"
        text = f"{path.name}{takes}: {error.strerror or error}{_limits(error, path.parent)}"
        raise OSError(error.errno, text) from error


def _limits(error: OSError, folder: Path) -> str:
    """Return, in brackets, how much there is of what ``error`` says there is too little of."""
    if error.errno == errno.EFBIG:
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if most != resource.RLIM_INFINITY:
            return f" (a file may have {format_bytes(most)}, says ulimit -f)"
    try:
        return f" ({format_bytes(shutil.disk_usage(folder).free)} are free)"
    except OSError:  # the folder has gone, and that is what the error is about
        return ""
