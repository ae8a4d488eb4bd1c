"""What the sections that time kernels share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from benchmarks.gpu.sections import Context

from kv8.attention.layer import LayerAttention
from kv8.bench.timing import Samples
from kv8.kernels.clock import seconds_of

_REPEATS: Final = 20


def measure(context: Context, work: Callable[[], object]) -> Samples:
    """Return seconds of ``work``, without its first rounds."""
    repeats, warm_up = (1, 0) if context.dry else (_REPEATS, 3)
    seconds = [seconds_of(work, context.device) for _ in range(warm_up + repeats)]
    return Samples(tuple(seconds[warm_up:]))


def with_queries(layer: LayerAttention) -> LayerAttention:
    """Return the layer with q scales: its queries are rounded to e4m3."""
    scale = torch.full((layer.geometry.num_heads,), 1 / 64, device=layer.k_codes.device)
    return replace(layer, q_scale=scale)
