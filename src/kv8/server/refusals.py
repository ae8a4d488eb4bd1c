"""Why a sound request is not served now. The routes turn each into its HTTP status."""

from kv8.errors import EngineError, RequestError


class EngineUnavailableError(EngineError):
    """The engine takes no requests: it is loading, stopping, or has failed."""


class QueueFullError(EngineError):
    """As many requests wait as may wait; one that comes later may find room.

    Attributes:
        retry_after: whole seconds after which another try makes sense.
    """

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TooManySequencesError(RequestError):
    """One request asks for more completions than this server ever has in work."""
