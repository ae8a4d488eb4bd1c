"""One thread owns the engine; the event loop sends it requests and gets back what they become.

Commands go in through a queue and run between two steps. What a step made comes out in one call
to the event loop, which puts it into mailboxes (`kv8.server.mailbox`). So the engine never waits
for a reader, and the event loop never waits for the engine. Everything here is the event loop's;
what runs on the thread is `kv8.server.worker`.
"""

import asyncio
import contextlib
import enum
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from kv8.engine.engine import Engine
from kv8.engine.failures import explain_failure
from kv8.engine.resolve import ResolvedConfig
from kv8.errors import EngineError
from kv8.server.admission import Admission
from kv8.server.mailbox import Mailbox
from kv8.server.refusals import EngineUnavailableError
from kv8.server.worker import EngineWorker, Submission

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class EngineState(enum.Enum):
    """What the engine can do for a request that comes now."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class EngineThread:
    """The engine on its thread, as the routes use it.

    Args:
        make_engine: called on the thread; returns an engine that is ready to serve.
        admission: how many sequences may be in work.

    Attributes:
        state: what the engine can do now.
        failure: what failed, in a line, once ``state`` is ``FAILED``.
        config: the engine's own, once it is loaded.
        admission: sequences in work, and what was refused.
    """

    def __init__(self, make_engine: Callable[[], Engine], admission: Admission) -> None:
        self.state = EngineState.LOADING
        self.failure: str | None = None
        self.config: ResolvedConfig | None = None
        self.admission = admission
        self._make_engine = make_engine
        self._worker = EngineWorker(self._post)
        self._thread = threading.Thread(target=self._run, name="kv8-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[None] | None = None
        self._mailboxes: dict[Mailbox, int] = {}  # open ones, with the number of their prompts
        self._calls: set[asyncio.Future[Any]] = set()
        self._num_opened = 0
        self._idle = asyncio.Event()
        self._idle.set()

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

    def open(self, num_choices: int) -> Mailbox:
        """Return a mailbox for a request of so many completions; from now on it has its place.

        Whoever gets a mailbox closes it, whatever happens: that frees what has not ended.

        Raises:
            EngineUnavailableError: the engine takes no requests now.
            QueueFullError: too many wait.
            TooManySequencesError: it alone is more than may ever wait.
        """
        self.require_ready()
        self.admission.enter(num_choices)
        self._num_opened += 1
        mailbox = Mailbox(str(self._num_opened), num_choices, self._close)
        self._mailboxes[mailbox] = 0
        self._idle.clear()
        return mailbox

    def submit(self, mailbox: Mailbox, asked: Submission) -> None:
        """Send a request to the engine; its answer comes to ``mailbox``, an open one."""
        assert mailbox.num_choices == len(asked.prompts) * asked.params.n
        if mailbox not in self._mailboxes:
            return  # it was closed, or everything was ended, meanwhile
        self._mailboxes[mailbox] = len(asked.prompts)
        worker = self._worker
        worker.send(lambda engine: worker.open(engine, mailbox, asked))

    async def call(self, function: Callable[[Engine], _Result]) -> _Result:
        """Return what ``function`` returns for the engine, called on its thread between steps.

        Raises:
            EngineUnavailableError: there is no engine: it is loading, or has failed.
            Exception: whatever ``function`` raises.
        """
        if self.state not in (EngineState.READY, EngineState.DRAINING):
            raise self._unavailable()
        result: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._calls.add(result)
        result.add_done_callback(self._calls.discard)
        self._worker.send(lambda engine: self._post(_outcome(function, engine, result)))
        return await result

    def require_ready(self) -> None:
        """Raise `EngineUnavailableError` unless the engine takes requests."""
        if self.state is not EngineState.READY:
            raise self._unavailable()

    def drain(self) -> None:
        """Take no more requests; those accepted go on."""
        if self.state in (EngineState.LOADING, EngineState.READY):
            self.state = EngineState.DRAINING

    @property
    def is_idle(self) -> bool:
        """Whether every mailbox is closed."""
        return self._idle.is_set()

    async def idle(self) -> None:
        """Wait until every mailbox is closed."""
        await self._idle.wait()

    def end_all(self, reason: str) -> None:
        """End all that is in work, with ``reason`` for whoever waits."""
        for mailbox in list(self._mailboxes):
            mailbox.fail(EngineUnavailableError(reason))
        for call in list(self._calls):
            if not call.done():
                call.set_exception(EngineUnavailableError(reason))

    async def stop(self, *, timeout: float) -> bool:
        """End the thread after the step it is in; return whether it has ended.

        While it loads, nothing ends it, and nothing waits for it.
        """
        self._worker.stop()
        if self._loaded is not None and self._loaded.done():
            await asyncio.to_thread(self._thread.join, timeout)
        return not self._thread.is_alive()

    def _close(self, mailbox: Mailbox) -> None:
        num_prompts = self._mailboxes.pop(mailbox, None)
        if num_prompts is None:
            return
        if num_prompts and not mailbox.ended:
            worker = self._worker
            worker.send(lambda engine: worker.abort(engine, mailbox, num_prompts))
        self.admission.leave(mailbox.num_choices)
        if not self._mailboxes:
            self._idle.set()

    def _run(self) -> None:
        """Load and serve; the thread's whole life."""
        try:
            engine = self._make_engine()
        except Exception as error:  # noqa: BLE001 - told to whoever waits in `loaded`
            failure = error
            self._post(lambda: self._not_loaded(failure))
            return
        except BaseException as error:  # noqa: BLE001 - as bad, but not to be raised elsewhere
            ended = EngineError(explain_failure(error))
            self._post(lambda: self._not_loaded(ended))
            return
        self._post(lambda: self._ready(engine.config))
        try:
            self._worker.serve(engine)
        except BaseException as error:  # noqa: BLE001 - told to everybody who waits
            line = explain_failure(error)
            self._post(lambda: self._failed(line))

    def _post(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its readers with it
            self._loop.call_soon_threadsafe(function)

    def _ready(self, config: ResolvedConfig) -> None:
        self.config = config
        if self.state is EngineState.LOADING:
            self.state = EngineState.READY
        assert self._loaded is not None
        self._loaded.set_result(None)

    def _not_loaded(self, error: Exception) -> None:
        self.state, self.failure = EngineState.FAILED, str(error)
        assert self._loaded is not None
        self._loaded.set_exception(error)

    def _failed(self, line: str) -> None:
        self.state, self.failure = EngineState.FAILED, line
        logger.critical("The engine has failed and serves no more; restart it. %s", line)
        self.end_all(f"The engine has failed: {line}")

    def _unavailable(self) -> EngineUnavailableError:
        texts = {
            EngineState.LOADING: "The model is still loading. Try again when /health says ready.",
            EngineState.DRAINING: "The server is stopping and takes no more requests.",
            EngineState.FAILED: f"The engine has failed: {self.failure}",
        }
        return EngineUnavailableError(texts[self.state])


def _outcome(
    function: Callable[[Engine], _Result], engine: Engine, result: "asyncio.Future[_Result]"
) -> Callable[[], None]:
    """Call ``function`` now, and return what tells ``result`` of it."""
    try:
        value = function(engine)
    except Exception as error:  # noqa: BLE001 - the caller's, and told to the caller
        failure = error
        return lambda: None if result.done() else result.set_exception(failure)
    return lambda: None if result.done() else result.set_result(value)
