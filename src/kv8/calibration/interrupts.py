"""What ends a calibration from outside: ctrl-C and SIGTERM, alike, and never in mid-write.

Both become an exception that rises wherever the work happens to be. Where that is a ``__del__`` or
another callback, Python drops it; so what came is noted too, and rises again at `raise_noticed`.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

TERMINATED: Final = 128 + signal.SIGTERM  # an exit code, as shells say it
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_noticed: type[BaseException] | None = None


class Terminated(SystemExit):
    """SIGTERM came. Uncaught, it ends the process with the exit code of that."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


@contextmanager
def raised_interrupts() -> Iterator[None]:
    """Let a SIGINT or SIGTERM that comes inside the ``with`` block raise an exception there.

    That is `KeyboardInterrupt`, or `Terminated`; it rises at the block's end at the latest. Signals
    that somebody else handles stay as they are; so does everything outside of the main thread,
    where no signal arrives.
    """
    global _noticed
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        unhandled = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        before = {n: usual for n, usual in unhandled.items() if signal.getsignal(n) is usual}
    if not before:
        yield
        return
    _noticed = None
    for number in before:
        signal.signal(number, _notice)
    try:
        yield
        raise_noticed()
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
        _noticed = None


def raise_noticed() -> None:
    """Raise what a signal raised before, if it was lost on the way; not for use in clean-up."""
    if _noticed is not None:
        raise _noticed


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Let a SIGINT or SIGTERM that comes inside the ``with`` block take effect at its end.

    One that nobody in this process handles is not held, and neither is anything outside of the main
    thread, where no signal arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        received.append((number, frame))

    previous: dict[int, Any] = {n: signal.getsignal(n) for n in _SIGNALS}
    previous = {number: handler for number, handler in previous.items() if callable(handler)}
    for number in previous:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if received:
        number, frame = received[0]
        previous[number](number, frame)


def _notice(number: int, _: FrameType | None) -> None:
    global _noticed
    _noticed = Terminated if number == signal.SIGTERM else KeyboardInterrupt
    raise _noticed
