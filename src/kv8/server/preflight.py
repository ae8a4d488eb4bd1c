"""What can be known to fail before weights are read, so that it fails before the port opens."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from kv8.calibration.start_up import start_samples
from kv8.engine.layers import check_backend
from kv8.engine.resolve import ResolvedConfig, resolve_options
from kv8.engine.resolve_memory import free_memory
from kv8.errors import CapacityError, RequestError
from kv8.models.outline import check_tensors
from kv8.models.tokenizer import load_tokenizer
from kv8.models.weight_storage import loaded_bytes
from kv8.options import EngineOptions
from kv8.server.settings import ServerSettings
from kv8.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What a server is going to serve.

    Attributes:
        config: the engine's options, resolved.
        tokenizer: for the server's own use.
        chat_template: a Jinja template in place of the tokenizer's.
    """

    config: ResolvedConfig
    tokenizer: Any
    chat_template: str | None


def preflight(options: EngineOptions, settings: ServerSettings) -> Plan:
    """Check all that can be checked without weights, in seconds.

    Raises:
        KV8Error: the start would fail; the message is for who started it.
    """
    template = _read_template(settings.chat_template)
    config = resolve_options(options)
    _check_memory(config)
    check_backend(config)
    tokenizer = load_tokenizer(config.source, options.tokenizer)
    if template is not None:
        _check_template(settings.chat_template, template, tokenizer)
    if options.measures_scales:
        start_samples(config, tokenizer)
    check_tensors(config.source.folder, config.model_config, config.dtype)
    return Plan(config, tokenizer, template)


def _read_template(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"chat_template={name!r} cannot be read: {reason}. Give a file with a Jinja template."
        ) from error


def _check_template(name: str | None, template: str, tokenizer: Any) -> None:
    """Refuse what is no Jinja; that it may not take every conversation is another matter."""
    hello = [{"role": "user", "content": "hello"}]
    try:
        tokenizer.apply_chat_template(hello, chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise RequestError(
            f"chat_template={name!r} is no Jinja template: line {error.lineno}: {error.message}. "
            f"Correct it."
        ) from error
    except Exception:
        logger.debug("chat_template=%r cannot write a first message alone.", name, exc_info=True)


def _check_memory(config: ResolvedConfig) -> None:
    """Refuse a cache that would have the machine run out of memory once it is full."""
    free = free_memory(config.device)
    weights = loaded_bytes(config.source.folder, config.dtype)
    cache = config.capacity.cache_bytes
    if weights + cache > free:
        room = max(free - weights, 0)
        raise CapacityError(
            f"The KV cache takes {format_bytes(cache)} and the weights about "
            f"{format_bytes(weights)}, and {format_bytes(free)} of memory are free. Give "
            f"--kv-cache-memory of {format_bytes(room)} ({room} bytes) or less, or free memory."
        )
