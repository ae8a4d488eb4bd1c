"""Helpers of the calibration tests: what a model's attention sees, noted and compared."""

from collections.abc import Sequence
from typing import Any

import torch
from tests.tiny_models import prompt_ids

from kv8.calibration.collect import collect
from kv8.calibration.observations import Observations
from kv8.calibration.scales import make_scales
from kv8.engine.engine import Engine
from kv8.formats.base import FP8_E4M3
from kv8.scales.scale import SIDES, ModelScales

LENGTHS = (5, 33, 64, 1, 17, 100, 40, 2)


def texts(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> list[list[int]]:
    """Return random samples of these lengths."""
    return [prompt_ids(length, seed=100 * seed + i) for i, length in enumerate(lengths)]


def observe(engine: Engine, samples: Sequence[Sequence[int]], **options: Any) -> Observations:
    """Return what the samples are in every layer of the engine's model."""
    observations = Observations(engine.config.dtype)
    collect(engine.runner.model, engine.config, samples, observations, **options)
    return observations


def scales_of(engine: Engine, observations: Observations, **options: Any) -> ModelScales:
    """Return the scales made of ``observations``."""
    return make_scales(observations, engine.config.geometry, FP8_E4M3, **options)


def numbers(scales: ModelScales) -> dict[tuple[int, str], tuple[float, ...]]:
    """Return the scales' values alone, by layer and side."""
    return {
        (layer, side): scale.values
        for layer, sides in scales
        for side in SIDES
        if (scale := sides.side(side)) is not None
    }


def same(one: Observations, other: Observations) -> bool:
    """Return whether two observations are equal to the last count."""
    if (one.num_tokens, one.num_samples) != (other.num_tokens, other.num_samples):
        return False
    first, second = one.tensors(), other.tensors()
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )
