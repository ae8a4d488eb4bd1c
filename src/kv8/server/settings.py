"""How the server serves: where it listens, whom it lets in, how much it takes.

Every setting's help text stands here once; the command line is a view of these fields.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kv8.errors import RequestError
from kv8.units import parse_bytes

LARGEST_PORT = 65_535
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of one server.

    Raises:
        RequestError: a setting has a value it cannot have; the message lists those it can.
    """

    host: str = _setting(
        "127.0.0.1",
        "Address to listen on. The default is this machine alone; 0.0.0.0 is every network it is "
        "in, so give an --api-key with it.",
    )
    port: int = _setting(8000, "Port to listen on; 0 takes any that is free.")
    api_key: Sequence[str] = _setting(
        (),
        "What clients must send as `Authorization: Bearer KEY`. Without one, anybody who reaches "
        "the port is served. Default: the environment variable KV8_API_KEY, which other users of "
        "the machine cannot see.",
    )
    served_model_name: Sequence[str] = _setting(
        (),
        "What clients may call the model; the first is what /v1/models lists first, and what "
        "answers carry if the client names none. Default: the model as given.",
    )
    max_queued: int = _setting(
        256,
        "Most sequences that wait for their turn besides those that run (--max-num-seqs); "
        "requests beyond are answered 429.",
    )
    max_body_size: int | str = _setting("4MiB", "Largest request body, like 4MiB.")
    allowed_origins: Sequence[str] = _setting(
        (),
        "Origins whose web pages may call the server (CORS), like https://example.org; * is all. "
        "Default: none.",
    )
    chat_template: str | None = _setting(
        None, "File with a Jinja chat template, in place of the tokenizer's."
    )
    drain_timeout: float = _setting(
        300.0, "Seconds a stopping server gives running requests before it ends them."
    )

    def __post_init__(self) -> None:
        if not self.host:
            raise RequestError("host is empty: give an address, like 127.0.0.1 or 0.0.0.0.")
        for name, low, high in (("port", 0, LARGEST_PORT), ("max_queued", 0, None)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or value < low or (high is not None and value > high):
                allowed = f"from {low} to {high}" if high is not None else f"of at least {low}"
                raise RequestError(f"{name} must be a whole number {allowed}, got {value!r}.")
        for name, check in (
            ("api_key", _check_key),
            ("served_model_name", _check_name),
            ("allowed_origins", _check_origin),
        ):
            values = getattr(self, name)
            values = (values,) if isinstance(values, str) else tuple(values)
            if not all(isinstance(value, str) and value for value in values):
                raise RequestError(f"{name} holds an empty text. Leave it out instead.")
            for value in values:
                check(value)
            object.__setattr__(self, name, values)
        size = parse_bytes(self.max_body_size, option="max_body_size")
        object.__setattr__(self, "max_body_size", size)
        if not self.drain_timeout >= 0:
            raise RequestError(
                f"drain_timeout must be a number of seconds >= 0, got {self.drain_timeout!r}."
            )


def _check_key(key: str) -> None:
    """Refuse a key no client could send, so that nobody is locked out in silence."""
    if not key.isprintable() or key != key.strip():
        raise RequestError(
            "api_key holds a key that no header can carry: blanks around it, a line break or other "
            "control characters, or bytes that are no UTF-8. Give printable characters."
        )


def _check_name(name: str) -> None:
    if not name.isprintable():
        raise RequestError(
            f"served_model_name={name!a} is no text that can be sent. Give printable characters."
        )


def _check_origin(origin: str) -> None:
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise RequestError(
            f"allowed_origins: {origin!a} is no origin. Give *, or a scheme and a host as browsers "
            f"send them: https://example.org, http://localhost:3000, without a path."
        )


SETTING_FIELDS = {f.name: f for f in fields(ServerSettings)}
