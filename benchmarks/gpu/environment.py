"""Machine, versions, and how fast this GPU copies and multiplies: the roofs of all the rest."""

import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from benchmarks.gpu.sections import Context, row

from kv8.bench.conditions import gpu_facts
from kv8.bench.roof import Roof

_PACKAGES: Final = ("torch", "triton", "transformers", "accelerate", "flash-attn-3")
_ROUNDS: Final = 12


def body(context: Context) -> dict[str, Any]:
    """Return the facts, and the roofs with their spread."""
    facts: dict[str, Any] = {"python": platform.python_version()}
    facts |= {name: _version(name) for name in _PACKAGES}
    facts["flash_attn_interface"] = importlib.util.find_spec("flash_attn_interface") is not None
    if context.device.type == "cuda":
        facts |= gpu_facts(context.device)
    roof = roof_of(context)
    moved = roof.move_seconds
    bandwidth = roof.bytes_per_second
    spread = [roof.moved_bytes / moved.most / 1e12, roof.moved_bytes / moved.least / 1e12]
    rows = [row("copy bandwidth", bandwidth / 1e12, unit="TB/s", spread=spread)]
    for name, seconds in roof.matmul_seconds.items():
        speed = roof.matmul_flop / seconds.median / 1e12
        spread = [
            roof.matmul_flop / seconds.most / 1e12,
            roof.matmul_flop / seconds.least / 1e12,
        ]
        rows.append(row(f"{name} matmul", speed, unit="TFLOP/s", spread=spread))
    return {"passed": True, "facts": facts, "rows": rows}


def roof_of(context: Context) -> Roof:
    """Return the roofs of this run, measured when first asked for."""
    if context.roof is None:
        context.roof = Roof(torch.bfloat16, context.device)
        for _ in range(2 if context.dry else _ROUNDS):
            context.roof.sample()
    return context.roof


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
