"""Which attention backend serves a model: by name, or the first that can; the reason is logged."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kv8.attention.backend import AttentionBackend
from kv8.attention.layer import LayerAttention
from kv8.errors import RequestError

logger = logging.getLogger(__name__)

AUTO: Final = "auto"


@dataclass(frozen=True)
class BackendEntry:
    """A backend that may be chosen.

    Attributes:
        name: as the user writes it.
        load: imports and returns it; raises `ImportError` with a reason where it cannot run.
        character: what to expect of it, for the log.
        devices: kinds of device for whose caches `auto` takes it; `None` for all. It is not even
            loaded for others.
    """

    name: str
    load: Callable[[], AttentionBackend]
    character: str
    devices: tuple[str, ...] | None = None


def _load_triton() -> AttentionBackend:
    try:
        from kv8.attention.triton import TritonBackend
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Triton is not installed ({error}); `pip install 'kv8[cuda]'` brings it"
        ) from error
    return TritonBackend()


def _load_measured() -> AttentionBackend:
    _load_triton()  # says what is missing, if it is that
    from kv8.attention.measured import MeasuredBackend

    return MeasuredBackend()


def _load_flash3() -> AttentionBackend:
    from kv8.attention.flash3 import Flash3Backend

    return Flash3Backend()


def _load_cpu() -> AttentionBackend:
    from kv8.attention.cpu import CpuBackend

    return CpuBackend()


def _load_reference() -> AttentionBackend:
    from kv8.attention.reference import ReferenceBackend

    return ReferenceBackend()


# In order of preference: auto takes the first that loads and refuses no layer.
ENTRIES: Final = (
    BackendEntry(
        "measured",
        _load_measured,
        "the triton kernels or FlashAttention 3's, whichever is measured to be faster",
        devices=("cuda",),
    ),
    BackendEntry(
        "triton",
        _load_triton,
        "GPU kernels that read the stored codes in place",
        devices=("cuda",),
    ),
    BackendEntry(
        "cpu",
        _load_cpu,
        "native kernels that read the stored codes in place",
        devices=("cpu",),
    ),
    BackendEntry(
        "flash3",
        _load_flash3,
        "FlashAttention 3 over the stored codes; the triton backend stores them",
        devices=(),
    ),
    BackendEntry(
        "reference",
        _load_reference,
        "plain torch: exact, runs anywhere; widens the whole context to float32 in every layer of "
        "every step, so long contexts decode several times slower than with a kernel",
    ),
)


def check_backend_name(name: str, entries: Sequence[BackendEntry] = ENTRIES) -> None:
    """Raise `RequestError` if no backend is called ``name``; loads none."""
    names = [AUTO, *(entry.name for entry in entries)]
    if name not in names:
        raise RequestError(f"attention_backend={name!r} is not known. Allowed: {', '.join(names)}.")


def select_backend(
    name: str, layers: Sequence[LayerAttention], entries: Sequence[BackendEntry] = ENTRIES
) -> AttentionBackend:
    """Return the backend called ``name``, or with ``auto`` the first that can serve ``layers``.

    Raises:
        RequestError: no such backend, or it cannot serve these layers here; the message has the
            reason and the backends that can.
    """
    check_backend_name(name, entries)
    refusals: list[str] = []
    for entry in entries:
        if name not in (AUTO, entry.name) or (name == AUTO and not _suits(entry, layers)):
            continue
        backend, reason = _try(entry, layers)
        if backend is None:
            refusals.append(f"not {entry.name}: {reason}")
            continue
        why = "the first that can serve this model" if name == AUTO else "as asked"
        parts = [f"attention backend {entry.name}: {why}", entry.character, *refusals]
        logger.info("; ".join(parts))
        return backend
    able = [e.name for e in entries if e.name != name and _try(e, layers)[0] is not None]
    raise RequestError(
        f"attention_backend={name!r} cannot serve this model here ({'; '.join(refusals)}). "
        f"Backends that can: {', '.join(able) or 'none'}."
    )


def _suits(entry: BackendEntry, layers: Sequence[LayerAttention]) -> bool:
    devices = entry.devices
    return devices is None or all(layer.k_codes.device.type in devices for layer in layers)


def _try(
    entry: BackendEntry, layers: Sequence[LayerAttention]
) -> tuple[AttentionBackend | None, str]:
    """Return the entry's backend, or `None` and the reason why it cannot serve ``layers``."""
    try:
        backend = entry.load()
    except ImportError as error:
        return None, f"it cannot be loaded ({error})"
    for layer in layers:
        reason = backend.refuses(layer)
        if reason is not None:
            return None, f"layer {layer.geometry.layer}: {reason}"
    return backend, ""
