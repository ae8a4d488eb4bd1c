"""Every error kv8 raises on purpose: one small hierarchy, written for the person who must act.

A message says what was wrong, the value found, the values allowed, and what to do.
The command line prints the message alone and turns the class into an exit code.
"""


class KV8Error(Exception):
    """Base of all errors raised on purpose; anything else that escapes kv8 is a bug."""

    exit_code = 1


class RequestError(KV8Error, ValueError):
    """The caller asked for something that cannot be: a bad option, prompt or parameter."""

    exit_code = 2


class ModelError(RequestError):
    """The model cannot be found, read, or served correctly; nothing was started."""


class UnsupportedModelError(ModelError):
    """The model has a part kv8 cannot serve correctly; the message names it and the reason."""


class ScaleError(ModelError):
    """A scale is missing, unbound, of the wrong shape, or not a finite positive number."""


class LayerPlanError(RequestError):
    """A skip list entry or a cache dtype does not fit this model."""


class CapacityError(RequestError):
    """The cache cannot hold what was asked for; the message says what it could hold."""


class SourceError(KV8Error):
    """A model's files could not be fetched, verified or converted."""


class EngineError(KV8Error):
    """The engine failed while working on accepted requests."""


class OutputError(KV8Error):
    """A result could not be written; nothing of it was left behind."""
