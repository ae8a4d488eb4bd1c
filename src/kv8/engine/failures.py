"""How a failed step is told: a line for the user, the trace at debug level."""

import logging

from kv8.errors import KV8Error

logger = logging.getLogger(__name__)


def explain_failure(error: BaseException) -> str:
    """Log a failure, where it happened at debug level, and return it in a line for the user."""
    line = str(error) if isinstance(error, KV8Error) else f"{type(error).__name__}: {error}"
    if isinstance(error, Exception):  # an interrupt is what the user wanted
        logger.error("A step failed: %s", line)
    logger.debug("Where it failed:", exc_info=error)
    return line
