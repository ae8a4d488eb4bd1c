"""What every route gets: the settings, what is served, and the thread that serves it."""

from dataclasses import dataclass

from kv8.engine.resolve import ResolvedConfig
from kv8.options import EngineOptions
from kv8.server.engine_thread import EngineThread
from kv8.server.protocol.errors import ApiError
from kv8.server.settings import ServerSettings
from kv8.server.texts import Texts


@dataclass(frozen=True)
class ServerState:
    """What the routes of one server share.

    Attributes:
        settings: how it serves.
        options: what was asked of the engine.
        planned: what that came to, known before any weight is read.
        engine: the engine's thread: submit, abort, call, state.
        texts: a tokenizer of the server's own, used by one thread at a time.
        created: when it started, in seconds since 1970.
    """

    settings: ServerSettings
    options: EngineOptions
    planned: ResolvedConfig
    engine: EngineThread
    texts: Texts
    created: int

    @property
    def config(self) -> ResolvedConfig:
        """The settings in effect: the engine's own, or what is planned while it loads."""
        return self.engine.config or self.planned

    @property
    def model_name(self) -> str:
        """The first served name: what answers carry if the client names none."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name the model is served under."""
        return tuple(self.settings.served_model_name) or (self.options.model,)

    def require_model(self, name: str | None) -> None:
        """Refuse a name that is not served; `None` is the only model there is.

        Raises:
            ApiError: 404, as OpenAI has it.
        """
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            raise ApiError(
                404,
                f"model={name!r:.80} is not served here. Served: {served}.",
                param="model",
                code="model_not_found",
            )
