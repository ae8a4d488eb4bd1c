"""Scales measured with the loaded model, before anything is served; they hold from then on."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kv8.engine.resolve import ResolvedConfig, scale_decisions
from kv8.models.hook import HookedModel
from kv8.scales.resolve import resolve_scales
from kv8.scales.scale import ModelScales

# Called with the loaded model, what is known of it, and its tokenizer; returns a k and a v scale
# for every layer that stores its own, and q scales if queries are to be quantized.
ScaleMeasurement = Callable[[HookedModel, ResolvedConfig, Any], ModelScales]


def measure_scales(
    measure: ScaleMeasurement, model: HookedModel, config: ResolvedConfig, tokenizer: Any
) -> ResolvedConfig:
    """Return ``config`` with the scales that ``measure`` returns, and what they decide.

    Raises:
        ScaleError: one is missing or invalid.
    """
    options, plan = config.options, config.plan
    resolved = resolve_scales(
        config.geometry,
        plan,
        config.checkpoint,
        measure(model, config, tokenizer),
        options.missing_scales,
        options.query_dtype,
    )
    decided = {each.name: each for each in scale_decisions(plan, resolved, options)}
    return replace(
        config,
        scales=resolved.scales,
        fp8_queries=resolved.fp8_queries,
        decisions=tuple(decided.get(each.name, each) for each in config.decisions),
        messages=(*config.messages, *resolved.messages),
        warnings=(*config.warnings, *resolved.warnings),
    )
