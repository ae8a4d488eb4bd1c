"""A calibrated FP8 cache is closer to the unquantized one than an uncalibrated one that clips."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.engines import start_engine, teacher_forced
from tests.observing import observe, texts
from tests.tiny_models import TinyModel, prompt_ids

from kv8.calibration.scales import make_scales
from kv8.engine.engine import Engine
from kv8.formats.base import FORMATS
from kv8.scales.scale import ModelScales

HELD_OUT = prompt_ids(200, seed=77)
BIASED: dict[str, Any] = {"family": "qwen2", "key_bias_layers": (0, 3)}


def as_options(scales: ModelScales) -> Mapping[int, Mapping[str, tuple[float, ...]]]:
    return {layer: {"k": found.k.values, "v": found.v.values} for layer, found in scales if found.k}


def divergence(engine: Engine, reference: torch.Tensor) -> float:
    """Return the mean KL divergence of the next token on text no scale was made from."""
    found = teacher_forced(engine, HELD_OUT, chunks=[len(HELD_OUT)])
    return float((reference.exp() * (reference - found)).sum(dim=-1).mean())


def reference_of(folder) -> torch.Tensor:
    return teacher_forced(start_engine(folder), HELD_OUT, chunks=[len(HELD_OUT)])


@pytest.mark.parametrize("statistic", ["absmax", "mse"])
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_a_model_with_huge_key_biases_needs_calibration(
    tiny_model: TinyModel, strategy: str, statistic: str
) -> None:
    """Pitfall 39: keys beyond 448 lose their direction at scale 1.0; measured scales keep it."""
    folder = tiny_model(**BIASED)
    reference = reference_of(folder)
    uncalibrated = start_engine(folder, kv_cache_dtype="fp8")
    before = divergence(uncalibrated, reference)
    assert uncalibrated.runner.counters.read()[0].k.saturated > 0

    observations = observe(start_engine(folder), texts([100, 100, 60]))
    geometry = uncalibrated.config.geometry
    scales = make_scales(
        observations, geometry, FORMATS["fp8_e4m3"], strategy=strategy, statistic=statistic
    )
    calibrated = start_engine(folder, kv_cache_dtype="fp8", kv_scales=as_options(scales))
    assert divergence(calibrated, reference) < before / 2
    counts = calibrated.runner.counters.read()
    if statistic == "absmax":
        # Another text than the scales were made from may exceed its largest value, seldom.
        assert all(seen.k.saturated_share < 1e-3 for seen in counts.values())


def test_random_tokens_find_a_bias_too(tiny_model: TinyModel) -> None:
    from kv8.calibration.start_up import start_engine as start_measured
    from kv8.options import EngineOptions

    folder = tiny_model(**BIASED)
    reference = reference_of(folder)
    before = divergence(start_engine(folder, kv_cache_dtype="fp8"), reference)
    options = EngineOptions(
        model=str(folder), kv_cache_dtype="fp8", calculate_kv_scales=True, kv_cache_memory="2MiB"
    )
    assert divergence(start_measured(options), reference) < before / 2


def test_a_scale_a_head_helps_where_heads_differ_more_than_the_format_spans(
    tiny_model: TinyModel,
) -> None:
    """Pitfall 23: one scale for both heads costs the small one its precision; two do not.

    From e4m3's largest value to the smallest it holds with full precision there are 2**15, so a
    head may be a hundred times smaller than another and lose nothing. With 2**17 it is lost.
    """

    def one_loud_head(model) -> None:
        for layer in model.model.layers:
            rows = layer.self_attn.v_proj.weight.view(2, 16, -1)
            rows[1] /= 2.0**17
            # What reads the quiet head makes up for it, so that the model as a whole is the same.
            layer.self_attn.o_proj.weight.view(64, 4, 16)[:, 2:] *= 2.0**17

    folder = tiny_model(edit=one_loud_head)
    reference = reference_of(folder)
    engine = start_engine(folder)
    observations = observe(engine, texts([100, 100, 60]))
    found = {}
    for strategy in ("tensor", "attn_head"):
        scales = make_scales(
            observations, engine.config.geometry, FORMATS["fp8_e4m3"], strategy=strategy
        )
        served = start_engine(folder, kv_cache_dtype="fp8", kv_scales=as_options(scales))
        found[strategy] = divergence(served, reference)
    assert found["attn_head"] < found["tensor"] / 2
