"""One thread owns the engine; the event loop sends it requests and gets back what they become.

Commands go in through a queue and run between two steps. What a step made comes out in one call
to the event loop, which puts it into mailboxes (`kv8.server.mailbox`). So the engine never waits
for a reader, and the event loop never waits for the engine. Everything here is the event loop's;
what runs on the thread is `kv8.server.worker`.
"""

import asyncio
import enum
import logging
import math
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TypeVar

from kv8.engine.engine import Engine
from kv8.engine.failures import explain_failure
from kv8.engine.prompts import TokenizedPrompt
from kv8.errors import EngineError
from kv8.sampling_params import SamplingParams
from kv8.server.mailbox import Mailbox
from kv8.server.observer import RequestObserver
from kv8.server.refusals import EngineUnavailableError, QueueFullError, TooManySequencesError
from kv8.server.worker import EngineWorker

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class EngineState(enum.Enum):
    """What the engine can do for a request that comes now."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class EngineThread:
    """The engine on its thread, as routes use it.

    Args:
        make_engine: called on the thread; returns an engine that is ready to serve.
        max_num_seqs: sequences the engine runs at once.
        max_queued: sequences that may wait besides.
        observers: told of every request, on the thread.

    Attributes:
        state: what the engine can do now.
        failure: what failed, in a line, once ``state`` is ``FAILED``.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        max_num_seqs: int,
        max_queued: int,
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        self.state = EngineState.LOADING
        self.failure: str | None = None
        self._make_engine = make_engine
        self._max_num_seqs = max_num_seqs
        self._max_queued = max_queued
        self._worker = EngineWorker(self._post, observers)
        self._thread = threading.Thread(target=self._run, name="kv8-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[None] | None = None
        self._mailboxes: dict[Mailbox, int] = {}  # with the number of their prompts
        self._num_opened = 0

    def start(self) -> None:
        """Begin to load; call from the event loop that serves."""
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._thread.start()

    async def loaded(self) -> None:
        """Wait until the engine is ready.

        Raises:
            Exception: whatever kept it from loading.
        """
        assert self._loaded is not None, "start comes first"
        await asyncio.shield(self._loaded)

    @property
    def num_sequences(self) -> int:
        """Sequences that run or wait."""
        return sum(mailbox.num_unfinished for mailbox in self._mailboxes)

    def submit(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: SamplingParams,
        *,
        stream: bool,
        prefix: str = "req",
    ) -> Mailbox:
        """Send a request to the engine and return where its answer will be.

        Close the mailbox when done with it, whatever happened: only that frees an unfinished
        request.

        Args:
            prompts: one or more, each completed ``params.n`` times.
            params: for all of them.
            stream: whether the answer is read while it grows.
            prefix: what the answer's name begins with.

        Raises:
            EngineUnavailableError: the engine takes no requests now.
            QueueFullError: too many wait.
            TooManySequencesError: it alone is more than may ever wait.
        """
        self._require_ready()
        num_choices = len(prompts) * params.n
        self._require_room(num_choices)
        self._num_opened += 1
        mailbox = Mailbox(f"{prefix}-{self._num_opened}", num_choices, self._close)
        self._mailboxes[mailbox] = len(prompts)
        worker = self._worker
        worker.send(lambda engine: worker.open(engine, mailbox, prompts, params, stream=stream))
        return mailbox

    async def call(self, function: Callable[[Engine], _Result]) -> _Result:
        """Return what ``function`` returns for the engine, called on its thread between steps.

        Raises:
            EngineUnavailableError: there is no engine: it is loading, or has failed.
            Exception: whatever ``function`` raises.
        """
        if self.state not in (EngineState.READY, EngineState.DRAINING):
            raise EngineUnavailableError(self._explain_state())
        ...

    def drain(self) -> None:
        """Take no more requests; those accepted go on."""

    async def drained(self) -> None:
        """Wait until nothing accepted is left."""

    async def stop(self) -> None:
        """End what is left with an error for whoever waits, and end the thread."""
