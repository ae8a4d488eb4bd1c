"""Attention over 65,536 keys whose weights are about equal: a sum that loses digits shows here.

All values are positive, so nothing cancels; the average of n of them is known to a small part of
itself, and an accumulator of too few bits is off by percents. Decoding as it is cut for this GPU,
where a program sums a few hundred keys; decoding in one part, where it sums all; and the end of a
prompt, where FP8 attention uses the FP8 matrix units.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from benchmarks.gpu.measuring import in_one_part, values_as_codes
from benchmarks.gpu.sections import Context

from kv8.attention.layer import LayerAttention
from kv8.attention.reference import ReferenceBackend
from kv8.attention.select import select_backend
from kv8.bench.attention_work import Shape
from kv8.formats.base import BFLOAT16, FP8_E4M3, FP8_E5M2, KVFormat
from kv8.formats.encode import encode, torch_dtype

_CONTEXT: Final = 65_536
_QUERY_SIZE: Final = 0.05  # small queries, so weights are about equal
# Rounding of the output to the query's type, and as much again for the weights, whose errors
# cancel. In FP8 attention the reference has the same weights, but for a few at a boundary.
_TOLERANCES: Final = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


_NEW: Final = 16  # tokens of a prompt whose beginning is stored


def body(context: Context) -> dict[str, Any]:
    """Compare with the reference, in float32, on the same device."""
    tokens = 96 if context.dry else _CONTEXT
    shape = Shape(8, 2, 128, 1, 16, str(context.device))
    results = []
    for kv_format, fp8_queries in (
        (BFLOAT16, False), (FP8_E4M3, False), (FP8_E5M2, False), (FP8_E4M3, True),
    ):  # fmt: skip
        layer = _layer(shape, kv_format, 2 * tokens, fp8_queries=fp8_queries)
        name = f"{kv_format.name}, FP8 attention" if fp8_queries else kv_format.name
        for work, new, cut in (
            ("decode", 1, nullcontext),
            ("decode in one part", 1, in_one_part),
            ("prompt", _NEW, nullcontext),
            ("prompt, values as codes", _NEW, values_as_codes),
        ):
            if cut is values_as_codes and not fp8_queries:
                continue
            found = _compare(shape, layer, tokens, new, cut)
            results.append({"format": name, "work": work, **found})
    passed = all(found["relative_error"] <= found["tolerance"] for found in results)
    return {"passed": passed, "keys": tokens, "results": results}


def _layer(
    shape: Shape, kv_format: KVFormat, num_tokens: int, *, fp8_queries: bool
) -> LayerAttention:
    """Return a layer whose values are from 0.5 to 1.5."""
    (layer,) = shape.layers(kv_format, num_tokens)
    values = torch.rand(layer.v_codes.shape, device=shape.device) + 0.5
    layer.v_codes.copy_(
        encode(values, 1 / 64, kv_format)
        if kv_format.quantized
        else values.to(torch_dtype(kv_format))
    )
    if not fp8_queries:
        return layer
    scale = torch.full((shape.num_heads,), _QUERY_SIZE / 64, device=shape.device)
    return replace(layer, q_scale=scale)


def _compare(
    shape: Shape,
    layer: LayerAttention,
    tokens: int,
    new: int,
    cut: Callable[[], AbstractContextManager[Any]],
) -> dict[str, float]:
    """Return the largest relative error, and what is allowed."""
    batch, query = shape.batch(2, new, tokens), shape.queries(2 * new) * _QUERY_SIZE
    # Over FP8 codes a float16 query: its output shows smaller errors than a bfloat16 one.
    query = query.half() if layer.format.quantized else query
    with cut():
        found = select_backend("triton", [layer]).attend(layer, query, batch, shape.call)
    expected = ReferenceBackend().attend(layer, query.float(), batch, shape.call)
    error = float(((found.float() - expected).abs() / expected.abs()).max())
    return {"relative_error": error, "tolerance": _TOLERANCES[query.dtype]}
