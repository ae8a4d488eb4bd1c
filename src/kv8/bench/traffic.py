"""Bytes a decode step reads and operations a prefill takes, by formula: weights and stored codes.

A step reads every weight once, and for each sequence the codes of the tokens that each layer can
see. What is small beside these (activations, tables, logits) is not counted, so that a share of the
memory's speed is never flattered.
"""

from collections.abc import Sequence

from kv8.engine.resolve import ResolvedConfig
from kv8.models.step_work import StepWork


def decode_bytes(config: ResolvedConfig, work: StepWork, contexts: Sequence[int]) -> float:
    """Return the bytes that one decode step over sequences of these lengths reads."""
    weight_bytes = work.weights_read * {"float32": 4}.get(config.dtype, 2)
    return weight_bytes + sum(code_bytes(config, context) for context in contexts)


def code_bytes(config: ResolvedConfig, context: int) -> int:
    """Return the bytes of stored codes that attention over ``context`` tokens reads."""
    total = 0
    for layer in config.geometry.layers:
        visible = context if layer.window is None else min(context, layer.window)
        values = 2 * layer.num_kv_heads * layer.head_dim
        size = config.plan.format(layer.kv_source).bytes_per_value
        total += visible * values * size
    return total


def prefill_flop(config: ResolvedConfig, work: StepWork, context: int) -> int:
    """Return the operations of computing one prompt of ``context`` tokens and its last logits."""
    total = 2 * (work.per_token * context + work.per_logits)
    for layer in config.geometry.layers:
        window = context if layer.window is None else min(context, layer.window)
        # Queries before the window is full see 1, 2, ... window keys, the others see window.
        pairs = window * (window + 1) // 2 + (context - window) * window
        total += 4 * layer.num_heads * layer.head_dim * pairs
    return total
