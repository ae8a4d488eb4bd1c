"""How much memory the cache takes when the user names no amount."""

from pathlib import Path

import psutil
import torch

from kv8.errors import RequestError
from kv8.options import EngineOptions
from kv8.units import format_bytes

SHARE = 4  # a quarter of what is free
MOST = 4 * 2**30
GPU_SHARE = 0.9  # of what is free at the start, for all that an engine takes
_CGROUP = Path("/sys/fs/cgroup")


def default_cache_memory(
    device: torch.device, *, weight_bytes: int, useful_bytes: int
) -> tuple[int, str]:
    """Return the bytes the cache may take by default, and why.

    A quarter of what will be free once the weights are loaded, at most 4 GiB, and no more than
    the engine can ever use.

    Args:
        device: where the cache will be.
        weight_bytes: memory the weights will take on that device.
        useful_bytes: what the most sequences of the greatest length need.
    """
    free = max(free_memory(device) - weight_bytes, 0)
    share = free // SHARE
    if useful_bytes <= min(share, MOST):
        return useful_bytes, "what max_num_seqs sequences of the greatest length need"
    if share > MOST:
        return MOST, f"the most taken by default ({format_bytes(free)} free)"
    return share, f"a quarter of the {format_bytes(free)} free"


def gpu_cache_memory(
    device: torch.device, *, share: float | None, weight_bytes: int, useful_bytes: int
) -> tuple[int, str]:
    """Return about how many bytes the cache will get on a GPU, before the model is loaded.

    The engine itself measures what weights and work take, and gives the cache exactly the rest;
    see `kv8.engine.gpu_memory`.

    Args:
        device: where the cache will be.
        share: of the free memory, for everything; `None` for the default.
        weight_bytes: as for `default_cache_memory`.
        useful_bytes: likewise.
    """
    free = free_memory(device)
    share = GPU_SHARE if share is None else share
    rest = max(int(share * free) - weight_bytes, 0)
    if useful_bytes <= rest:
        return useful_bytes, "what max_num_seqs sequences of the greatest length need"
    return rest, (
        f"{100 * share:g} % of the {format_bytes(free)} free, less about "
        f"{format_bytes(weight_bytes)} of weights; what the largest step takes is measured at the "
        f"start, and comes off, too"
    )


def check_gpu_options(options: EngineOptions, device: torch.device) -> None:
    """Refuse options that mean nothing on ``device``.

    Raises:
        RequestError: an option is for GPUs.
    """
    if device.type != "cuda" and options.gpu_memory_utilization is not None:
        raise RequestError(
            f"gpu_memory_utilization={options.gpu_memory_utilization!r} is a share of a GPU's "
            f"memory, and this engine runs on the {str(device).upper()}. Say how much memory the "
            f"KV cache takes with kv_cache_memory."
        )


def free_memory(device: torch.device) -> int:
    """Return the bytes free on ``device``; on the CPU, within the container's limit too."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    limit, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used + _reclaimable(), 0))
    return available


def _read_number(path: Path) -> int | None:
    """Return the number a cgroup file holds; `None` for "max", or where there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable() -> int:
    """Return the bytes of cached files among those in use, which the kernel gives back at need."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(counts.get("inactive_file", "0"))
