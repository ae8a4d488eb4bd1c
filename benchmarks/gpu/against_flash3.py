"""Decode against FlashAttention 3 over the same FP8 codes: measured if installed, else as recorded.

It is timed as kv8 is: in a graph, several layers in turn, several times. Its queries are rounded to
e4m3 before, which costs it nothing here; and of some numbers of splits it has its best.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from benchmarks.gpu.measuring import measure, with_queries
from benchmarks.gpu.sections import Context, row

from kv8.attention.flash3 import flash3_arguments, load_flash3
from kv8.bench.attention_work import Shape
from kv8.bench.timing import Samples
from kv8.formats.base import FP8_E4M3
from kv8.kernels.clock import recorded

_GOAL: Final = 1.4
# What it took on an H200, recorded on 29 November 2026: seconds by sequences and tokens.
_RECORDED: Final = {(64, 8192): 408e-6, (8, 32_768): 207e-6}
_SPLITS: Final = (0, 1, 2, 4, 8, 16)  # 0: its own choice
_ROUNDS: Final = 5


def against_flash3(
    context: Context, shape: Shape, sequences: int, tokens: int, ours: Samples
) -> list[dict[str, Any]]:
    """Return how many times as long as ``ours`` FlashAttention 3 takes."""
    what = f"decode {sequences} x {tokens:,}, e4m3: over FlashAttention 3 FP8"
    if importlib.util.find_spec("flash_attn_interface") is None:
        before = _RECORDED.get((sequences, tokens))
        if before is None:
            return []
        note = "its time as recorded on another day; it is not installed here"
        return [row(what, before / ours.median, unit="x", goal=_GOAL, note=note)]
    function = load_flash3()
    batch, query = shape.batch(sequences, 1, tokens), shape.queries(sequences)
    layers = shape.layers(FP8_E4M3, (sequences + 1) * tokens)
    calls = [flash3_arguments(with_queries(each), query, batch, shape.call) for each in layers]
    rounds = 1 if context.dry else _ROUNDS

    def attend(**more: int) -> None:
        for arguments in calls * rounds:
            function(**arguments, **more)

    found: dict[str, float] = {}
    problems: dict[str, str] = {}
    for splits in _SPLITS[:1] if context.dry else _SPLITS:
        work = partial(attend, num_splits=splits) if splits else attend
        try:
            seconds = measure(context, recorded(work, context.device)).median
            found[f"{splits} splits"] = seconds / len(calls) / rounds
        except RuntimeError as error:
            problems[f"{splits} splits"] = str(error)
    if not found:  # it cannot be recorded
        found["without a graph"] = _alone(context, calls[0], function)
    best = min(found, key=lambda name: found[name])
    note = f"this run, in a graph, best of its splits: {best}"
    return [
        row(
            what,
            found[best] / ours.median,
            unit="x",
            goal=_GOAL,
            note=note if best != "without a graph" else f"this run, {best}",
            theirs_us={name: seconds * 1e6 for name, seconds in found.items()},
            problems=problems,
        )
    ]


def _alone(context: Context, arguments: dict[str, Any], function: Callable[..., object]) -> float:
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)
    return measure(context, lambda: function(**arguments)).median
