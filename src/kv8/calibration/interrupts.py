"""What ends a calibration from outside: ctrl-C and SIGTERM, alike, and never in mid-write."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

TERMINATED: Final = 128 + signal.SIGTERM  # an exit code, as shells say it
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Terminated(SystemExit):
    """SIGTERM came. Uncaught, it ends the process with the exit code of that."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


@contextmanager
def raised_termination() -> Iterator[None]:
    """Let a SIGTERM that comes inside the ``with`` block raise `Terminated` there.

    So it does what ctrl-C does: what was measured is kept. Where somebody handles SIGTERM already,
    or outside of the main thread, where no signal arrives, nothing is changed.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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


def _terminate(_: int, __: FrameType | None) -> None:
    raise Terminated
