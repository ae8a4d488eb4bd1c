"""What every route gets: the settings, what is served, and the thread that serves it."""

from dataclasses import dataclass, field
from typing import Any

from kv8.engine.resolve import ResolvedConfig
from kv8.options import EngineOptions
from kv8.server.engine_thread import EngineThread
from kv8.server.settings import ServerSettings
from kv8.server.texts import Texts


@dataclass(frozen=True)
class ServerState:
    """What the routes of one server share.

    Attributes:
        settings: how it serves.
        options: what was asked of the engine.
        config: what that came to, known before any weight is read.
        engine: the engine's thread: submit, abort, call, state.
        texts: a tokenizer of the server's own, used by one thread at a time.
        created: when it started, in seconds since 1970.
    """

    settings: ServerSettings
    options: EngineOptions
    config: ResolvedConfig
    engine: EngineThread
    texts: Texts
    created: int
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def model_name(self) -> str:
        """The name answers carry: the first served name."""
        return self.settings.served_model_name[0]
