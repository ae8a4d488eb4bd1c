"""Where an engine runs: from what was asked to one device, and the context its work runs in."""

from contextlib import AbstractContextManager, nullcontext

import torch

from kv8.errors import RequestError
from kv8.units import format_bytes

_CPU_BLOCK_SIZE, _GPU_BLOCK_SIZE = 16, 64


def resolve_device(asked: str) -> tuple[torch.device, str]:
    """Return the device an engine uses, a GPU always with its number, and why it is that one.

    Args:
        asked: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        RequestError: torch sees no such device; the message has what it sees.
    """
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        if number == 0:
            return torch.device("cpu"), "torch sees no GPU"
        return _current_gpu(), "a GPU, which is taken where there is one"
    if asked == "cpu":
        return torch.device("cpu"), "as asked"
    if number == 0:
        raise RequestError(f"device={asked!r} cannot be used: {_why_no_gpu()}. Give device=cpu.")
    if asked == "cuda":
        return _current_gpu(), "as asked"
    device = torch.device(asked)
    if device.index >= number:
        seen = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(number))
        raise RequestError(f"device={asked!r} does not exist. torch sees: {seen}.")
    return device, "as asked"


def describe_device(device: torch.device) -> str:
    """Return the device for people: ``cpu``, or ``cuda:0 (name, memory)``."""
    if device.type != "cuda":
        return str(device)
    memory = torch.cuda.get_device_properties(device).total_memory
    return f"{device} ({torch.cuda.get_device_name(device)}, {format_bytes(memory)})"


def choose_block_size(asked: int | None, device: torch.device) -> int:
    """Return how many tokens a cache block holds.

    On a GPU, blocks that hold a whole tile of keys are found by one look-up a tile.
    """
    if asked is not None:
        return asked
    return _GPU_BLOCK_SIZE if device.type == "cuda" else _CPU_BLOCK_SIZE


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on ``device``, whatever other engines use."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _current_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _why_no_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} was built without CUDA"
    return f"torch {torch.__version__} finds no usable GPU or driver"
