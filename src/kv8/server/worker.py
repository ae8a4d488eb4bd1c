"""What runs on the engine's thread: commands between steps, steps while there is work.

Nothing here waits for a reader. A step that fails ends the requests it was about and no others; a
probe then tells whether the engine can still serve anybody. An engine that cannot ends the thread.
"""

import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kv8.engine.engine import Engine
from kv8.engine.failures import explain_failure
from kv8.engine.prompts import TokenizedPrompt
from kv8.errors import EngineError, KV8Error
from kv8.outputs import RequestOutput
from kv8.sampling_params import SamplingParams
from kv8.server.feed import Feed
from kv8.server.mailbox import Mailbox, Update

logger = logging.getLogger(__name__)

Command: TypeAlias = Callable[[Engine], None]
Post: TypeAlias = Callable[[Callable[[], None]], None]


@dataclass(frozen=True)
class Submission:
    """What a request asks of the engine.

    Attributes:
        prompts: one or more, in tokens.
        params: for all of them.
        stream: whether the answer is read while it grows.
        arrived_at: when the request came, by `time.monotonic`.
    """

    prompts: Sequence[TokenizedPrompt]
    params: SamplingParams
    stream: bool
    arrived_at: float


_PROBE = "health-probe"  # no request is called so: theirs are numbered


class EngineWorker:
    """The engine's side of the server; all but `send` and `stop` belong to one thread.

    Args:
        post: has the event loop call a function.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._feeds: dict[str, Feed] = {}
        self._probing = False

    def send(self, command: Command) -> None:
        """Have ``command`` called with the engine, between two steps; from any thread."""
        self._commands.put(command)

    def stop(self) -> None:
        """Have `serve` return after the commands sent so far; from any thread."""
        self._commands.put(None)

    def serve(self, engine: Engine) -> None:
        """Work until `stop`.

        Raises:
            EngineError: the engine cannot serve any more.
        """
        while True:
            while not (self._commands.empty() and engine.has_unfinished):
                command = self._commands.get()
                if command is None:
                    return
                command(engine)
            failed_steps = engine.counters.failed_steps
            self._publish(engine.step())
            if engine.counters.failed_steps > failed_steps and not self._probing:
                self._probe(engine)

    def open(self, engine: Engine, mailbox: Mailbox, asked: Submission) -> None:
        """Queue all prompts of a request, or none of them and say why."""
        names: list[str] = []
        try:
            for number, (text, token_ids) in enumerate(asked.prompts):
                name = _name(mailbox, number)
                engine.add_request(
                    name, token_ids, asked.params, prompt=text, arrived_at=asked.arrived_at
                )
                names.append(name)
        except Exception as error:  # noqa: BLE001 - only this request is concerned
            for name in names:
                engine.abort(name)
            refusal = error if isinstance(error, KV8Error) else EngineError(explain_failure(error))
            self._post(lambda: mailbox.fail(refusal))
        else:
            for number, name in enumerate(names):
                self._feeds[name] = Feed(mailbox, number, stream=asked.stream)
            self._post(mailbox.accept)

    def abort(self, engine: Engine, mailbox: Mailbox, num_prompts: int) -> None:
        """End what has not ended of a request; nobody waits for it."""
        for number in range(num_prompts):
            name = _name(mailbox, number)
            self._feeds.pop(name, None)
            engine.abort(name)

    def _publish(self, outputs: Sequence[RequestOutput]) -> None:
        updates: list[tuple[Mailbox, Update]] = []
        for output in outputs:
            if output.request_id == _PROBE:
                self._judge(output)
                continue
            feed = self._feeds[output.request_id]
            update = feed.take(output)
            if update is not None:
                updates.append((feed.mailbox, update))
            if output.finished:
                del self._feeds[output.request_id]
        if updates:
            self._post(lambda: _deliver(updates))

    def _probe(self, engine: Engine) -> None:
        """Have the engine compute one token that nobody asked for, to see whether it can."""
        self._probing = True
        params = SamplingParams(temperature=0.0, max_tokens=1)
        engine.add_request(_PROBE, [0], params, arrived_at=time.monotonic())

    def _judge(self, probe: RequestOutput) -> None:
        if not probe.finished:
            return
        self._probing = False
        completion = probe.outputs[0]
        if completion.finish_reason == "error":
            raise EngineError(f"The engine fails whatever it is given: {completion.error}")
        logger.info("A step failed; the engine still serves others.")


def _deliver(updates: Sequence[tuple[Mailbox, Update]]) -> None:
    for mailbox, update in updates:
        mailbox.put(update)


def _name(mailbox: Mailbox, number: int) -> str:
    return f"{mailbox.request_id}/{number}"
