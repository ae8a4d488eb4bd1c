"""Under which conditions something was measured: machine, versions, threads, and who else was busy.

A figure without these says nothing, and one taken beside other work says something else.
"""

import os
import platform
import resource
import shlex
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import psutil
import torch

from kv8._version import __version__

_PACKAGES: Final = ("torch", "transformers")
_BUSY_LOAD: Final = 0.25  # of a core: load average a core, before anything was measured
_BUSY_SHARE: Final = 0.05  # of all cores: time taken by others while measuring


class Conditions:
    """Watches the machine inside a ``with`` block.

    Args:
        command: the command that measures, word by word.
        seed: what made-up data was drawn from.
        more: further facts about what is measured, by name.
        device: where that runs.

    Attributes:
        facts: all of it as plain data, complete after the block.
        warnings: what makes the figures doubtful, for people.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        seed: int,
        more: Mapping[str, Any],
        device: torch.device | None = None,
    ) -> None:
        self.facts: dict[str, Any] = {
            "command": shlex.join(command),
            "machine": cpu_name(),
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "kv8": __version__,
            **{name: _version(name) for name in _PACKAGES},
            "seed": seed,
            **({} if device is None or device.type != "cuda" else gpu_facts(device)),
            **more,
        }
        self.warnings: list[str] = []

    def __enter__(self) -> "Conditions":
        self.facts["load_before"] = os.getloadavg()[0]
        self._begin = time.monotonic(), _busy_seconds(), _own_seconds()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        elapsed, busy, own = (
            after - before
            for after, before in zip(
                (time.monotonic(), _busy_seconds(), _own_seconds()), self._begin, strict=True
            )
        )
        cores = os.cpu_count() or 1
        share = max(0.0, busy - own) / max(elapsed * cores, 1e-9)
        self.facts |= {
            "load_after": os.getloadavg()[0],
            "seconds": elapsed,
            "share_of_cpu_taken_by_others": share,
        }
        self.warnings = busy_warnings(self.facts["load_before"], share, cores)


def l2_bytes(device: torch.device) -> int:
    """Return the size of a GPU's L2 cache; 0 if torch does not know."""
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """Return what a figure measured on a GPU depends on."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "gpu_processors": properties.multi_processor_count,
        "gpu_l2_bytes": l2_bytes(device),
        "gpu_capability": list(torch.cuda.get_device_capability(device)),
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
    }


def busy_warnings(load_before: float, share_of_others: float, cores: int) -> list[str]:
    """Return what to tell a reader of figures taken on a machine that did other work, too."""
    found = []
    if load_before > _BUSY_LOAD * cores:
        found.append(f"the load average was {load_before:.1f} on {cores} cores before it began")
    if share_of_others > _BUSY_SHARE:
        found.append(f"other processes took {100 * share_of_others:.0f} % of the CPU meanwhile")
    if not found:
        return []
    return [f"This machine was busy: {' and '.join(found)}. Repeat this on a quiet one."]


def cpu_name() -> str:
    """Return what the processor calls itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _busy_seconds() -> float:
    """Return the seconds all cores together have worked, time stolen by other guests included."""
    times = psutil.cpu_times()._asdict()
    inside_others = ("guest", "guest_nice")  # counted in user and nice already
    idle = ("idle", "iowait")
    return float(sum(value for name, value in times.items() if name not in inside_others + idle))


def _own_seconds() -> float:
    """Return the seconds this process has worked, and its children that have ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(use.ru_utime + use.ru_stime for use in map(resource.getrusage, kinds))
