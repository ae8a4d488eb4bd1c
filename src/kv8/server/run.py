"""Starts a server and stays until it ends."""

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import Callable

from kv8.calibration.start_up import start_engine
from kv8.engine.engine import Engine
from kv8.options import EngineOptions
from kv8.server.admission import Admission
from kv8.server.app import make_app
from kv8.server.engine_thread import EngineThread
from kv8.server.lifecycle import Lifecycle
from kv8.server.listener import Listener
from kv8.server.preflight import Plan, preflight
from kv8.server.settings import ServerSettings
from kv8.server.state import ServerState
from kv8.server.texts import Texts

logger = logging.getLogger(__name__)

_CUT_OFF = 1  # requests that had been accepted were not finished


def serve(
    options: EngineOptions,
    settings: ServerSettings,
    *,
    say: Callable[[str], None],
    make_engine: Callable[[EngineOptions], Engine] = start_engine,
) -> int:
    """Serve until a signal ends it; return the program's exit code.

    Args:
        options: of the engine.
        settings: of the server.
        say: tells whoever started it how it goes, in a line.
        make_engine: makes the engine, on the thread that will own it.

    Raises:
        KV8Error: the start failed; before the port was opened if it could be known by then.
    """
    listener = Listener(settings.host, settings.port)
    try:
        plan = preflight(options, settings)
        listener.open()
    except BaseException:
        listener.close()
        raise
    if listener.reaches_others and not settings.api_key:
        logger.warning(
            "The server listens on %s without an API key: whoever reaches it is served. Give an "
            "--api-key, or listen on 127.0.0.1.",
            settings.host,
        )
    state = make_state(options, settings, plan, lambda options: _settled(make_engine(options)))
    try:
        return asyncio.run(_run(state, listener, say))
    finally:
        gc.unfreeze()


def make_state(
    options: EngineOptions,
    settings: ServerSettings,
    plan: Plan,
    make_engine: Callable[[EngineOptions], Engine] = start_engine,
) -> ServerState:
    """Return what the routes of a server share; its engine is not started."""
    return ServerState(
        settings=settings,
        options=options,
        planned=plan.config,
        engine=EngineThread(
            lambda: make_engine(options),
            Admission(max_num_seqs=options.max_num_seqs, max_queued=settings.max_queued),
        ),
        texts=Texts(plan.tokenizer, chat_template=plan.chat_template),
        created=int(time.time()),
    )


def _settled(engine: Engine) -> Engine:
    """Have the garbage collector pass over what is there now: it stays as long as the server.

    There are hundreds of thousands of objects, most of them of libraries. To look at them all takes
    about half a second, in which nobody is answered.
    """
    gc.collect()
    gc.freeze()
    return engine


async def _run(state: ServerState, listener: Listener, say: Callable[[str], None]) -> int:
    life = Lifecycle(
        make_app(state),
        state.engine,
        listener,
        model=state.options.model,
        drain_timeout=state.settings.drain_timeout,
        say=say,
    )
    try:
        finished = await life.run()
    finally:
        state.texts.close()
        ended = await life.join()
    code = 0 if finished else _CUT_OFF
    if not ended:
        # The thread is inside native code, under which the interpreter must not be taken down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
