"""What the sections that time kernels share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import torch
from benchmarks.gpu.sections import Context

from kv8.attention.layer import LayerAttention
from kv8.bench.timing import Samples
from kv8.kernels import triton_launch
from kv8.kernels.clock import seconds_of
from kv8.kernels.triton_config import DecodeConfig, PrefillConfig

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


def in_one_part() -> AbstractContextManager[Any]:
    """Let decode give all keys of a sequence to one program."""
    choose = triton_launch.decode_config

    def whole(*arguments: Any) -> DecodeConfig:
        return replace(choose(*arguments), parts=1)

    return mock.patch.object(triton_launch, "decode_config", whole)


def values_as_codes() -> AbstractContextManager[Any]:
    """Let FP8 attention multiply weights and values as FP8 too, where the GPU can."""
    choose = triton_launch.prefill_config

    def narrow(*arguments: Any, fp8_products: bool) -> PrefillConfig:
        return replace(choose(*arguments, fp8_products=fp8_products), fp8_values=fp8_products)

    return mock.patch.object(triton_launch, "prefill_config", narrow)
