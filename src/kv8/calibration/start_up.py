"""Starts an engine, with scales measured first if its options ask for that.

Measuring is a step of its own: it is done before the cache the engine serves from exists, on
declared tokens only, and what it finds holds for the engine's life. No probe, warm-up or request
has a part in it, and nothing is ever stored under another scale.
"""

import logging
from typing import Any, Final

from kv8.calibration.collect import collect
from kv8.calibration.observations import Observations
from kv8.calibration.scales import make_scales
from kv8.calibration.sources import RANDOM, Samples, load_samples
from kv8.engine.engine import Engine
from kv8.engine.resolve import ResolvedConfig
from kv8.models.hook import HookedModel
from kv8.options import EngineOptions
from kv8.scales.scale import ModelScales, Side

logger = logging.getLogger(__name__)

# One batch of random tokens takes a second or two on a CPU; a text may take a little longer.
_RANDOM_SAMPLES: Final = 8
_RANDOM_LENGTH: Final = 256
_TEXT_SAMPLES: Final = 32
_TEXT_LENGTH: Final = 512


def start_engine(options: EngineOptions, *, check_invariants: bool = False) -> Engine:
    """Return an engine that is ready to serve.

    With ``calculate_kv_scales`` or ``calibrate_on`` its scales are the absolute maximum over the
    tokens asked for, divided by the format's largest value, one scale a tensor.

    Raises:
        RequestError: the options do not fit the model, or the text cannot be read.
        ScaleError: a layer could not be measured; names it.
    """
    measure = _measure if options.measures_scales else None
    return Engine(options, measure=measure, check_invariants=check_invariants)


def _measure(model: HookedModel, config: ResolvedConfig, tokenizer: Any) -> ModelScales:
    data = start_samples(config, tokenizer)
    random = config.options.calculate_kv_scales
    observations = Observations(config.dtype, source=RANDOM if random else "")
    collect(model, config, data.sequences, observations)
    # Queries stay as they are unless asked for: random tokens are a poor measure of them.
    sides: tuple[Side, ...] = ("q", "k", "v") if config.options.query_dtype == "fp8" else ("k", "v")
    scales = make_scales(observations, config.geometry, config.kv_format, sides=sides)
    logger.info(
        "Measured the KV cache's scales on %s: %s tokens used of %s asked for. They are fixed now.",
        data.description,
        f"{data.tokens_used:,}",
        f"{data.tokens_asked:,}",
    )
    return scales


def start_samples(config: ResolvedConfig, tokenizer: Any) -> Samples:
    """Return what an engine whose options say that it measures its scales measures them on.

    Args:
        config: the engine's.
        tokenizer: the model's.

    Raises:
        RequestError: there is no such text, it cannot be read, or it is too short.
        SourceError: a data set could not be fetched.
    """
    options = config.options
    text = options.calibrate_on
    length = _RANDOM_LENGTH if text is None else _TEXT_LENGTH
    return load_samples(
        RANDOM if text is None else str(text),
        tokenizer,
        samples=_RANDOM_SAMPLES if text is None else _TEXT_SAMPLES,
        max_length=min(length, config.max_model_len),
        seed=options.seed,
    )
