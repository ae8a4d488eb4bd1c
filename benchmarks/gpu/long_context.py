"""Decode over 65,536 keys whose weights are about equal: a sum that loses digits shows here.

All values are positive, so nothing cancels; the average of n of them is known to a small part of
itself, and an accumulator of too few bits is off by percents.
"""

from dataclasses import replace
from typing import Any, Final

import torch
from benchmarks.gpu.sections import Context

from kv8.attention.reference import ReferenceBackend
from kv8.attention.select import select_backend
from kv8.bench.attention_work import Shape
from kv8.formats.base import BFLOAT16, FP8_E4M3, FP8_E5M2
from kv8.formats.encode import encode, torch_dtype

_CONTEXT: Final = 65_536
_QUERY_SIZE: Final = 0.05  # small queries, so weights are about equal
# Rounding of the output to the query's type, and as much again for the weights, whose errors
# cancel. In FP8 attention the reference has the same weights, but for a few at a boundary.
_TOLERANCES: Final = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def body(context: Context) -> dict[str, Any]:
    """Compare with the reference, in float32, on the same device."""
    tokens = 96 if context.dry else _CONTEXT
    shape = Shape(8, 2, 128, 1, 16, str(context.device))
    results, passed = [], True
    for kv_format, fp8_queries in (
        (BFLOAT16, False), (FP8_E4M3, False), (FP8_E5M2, False), (FP8_E4M3, True),
    ):  # fmt: skip
        (layer,) = shape.layers(kv_format, 2 * tokens)
        values = torch.rand(layer.v_codes.shape, device=context.device) + 0.5
        layer.v_codes.copy_(
            encode(values, 1 / 64, kv_format)
            if kv_format.quantized
            else values.to(torch_dtype(kv_format))
        )
        if fp8_queries:
            scale = torch.full((shape.num_heads,), _QUERY_SIZE / 64, device=context.device)
            layer = replace(layer, q_scale=scale)
        batch, query = shape.batch(2, 1, tokens), shape.queries(2) * _QUERY_SIZE
        # Over FP8 codes a float16 query: its output shows smaller errors than a bfloat16 one.
        query = query if kv_format is BFLOAT16 else query.half()
        found = select_backend("triton", [layer]).attend(layer, query, batch, shape.call)
        expected = ReferenceBackend().attend(layer, query.float(), batch, shape.call)
        error = float(((found.float() - expected).abs() / expected.abs()).max())
        tolerance = _TOLERANCES[query.dtype]
        passed = passed and error <= tolerance
        name = f"{kv_format.name}, FP8 attention" if fp8_queries else kv_format.name
        results.append({"format": name, "relative_error": error, "tolerance": tolerance})
    return {"passed": passed, "keys": tokens, "results": results}
