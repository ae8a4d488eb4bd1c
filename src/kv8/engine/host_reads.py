"""Notices what makes the host wait for the device: the one thing a recorded step must not do.

It looks at torch's operations one by one, so it knows them by name: reading a number out of a
tensor, sizes that depend on values, copies to the host, copies from memory that is not pinned.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result has a size, or is a number, that only the device knows.
_WAITING: Final = frozenset(
    (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique_dim",
        "_unique2",
        "unique_consecutive",
        "bincount",
        "repeat_interleave",  # with a tensor of repeats
        "equal",
    )
)


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects in ``found``, inside a ``with`` block, what waits for the device.

    On a CPU, copies between host and device cannot be told apart; the rest can.

    Attributes:
        found: names of the operations, in the order they were met, each once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        with self:  # in inference mode, what is made of other operations arrives whole
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func.overloadpacket.__name__
        if _waits(name, args, kwargs) and name not in self.found:
            self.found.append(name)
        return func(*args, **kwargs)


def host_reads(compute: Callable[[], None]) -> list[str]:
    """Run ``compute`` and return the operations in it that wait for the device."""
    reads = HostReads()
    with reads:
        compute()
    return reads.found


def _waits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if name in _WAITING:
        return name != "repeat_interleave" or any(map(torch.is_tensor, args[1:])) or len(args) == 1
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        # Indices that are truth values are turned into numbers first, as many as are true.
        return any(torch.is_tensor(i) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name in ("_to_copy", "copy_"):
        source, target = _copy_ends(name, args, kwargs)
        if source == target or "cpu" not in (source, target):
            return False
        pinned = args[0 if name == "_to_copy" else 1].is_pinned() if source == "cpu" else False
        return not (
            pinned and bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        )
    return False


def _copy_ends(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kinds of device a copy goes from and to."""
    if name == "copy_":
        return args[1].device.type, args[0].device.type
    target = kwargs.get("device")
    return args[0].device.type, args[0].device.type if target is None else torch.device(target).type
