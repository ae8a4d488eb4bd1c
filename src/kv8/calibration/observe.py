"""Observes a job's samples, showing progress and keeping it when the work is broken off."""

import logging

from tqdm import tqdm

from kv8.calibration.collect import collect
from kv8.calibration.job import Job
from kv8.calibration.observations import Observations
from kv8.calibration.partial import PartialResult
from kv8.calibration.parts import split_samples
from kv8.calibration.sources import RANDOM, Samples
from kv8.engine.engine import Engine
from kv8.errors import CapacityError, KV8Error

logger = logging.getLogger(__name__)


def observe(
    engine: Engine, job: Job, samples: Samples, partial: PartialResult | None, *, use_tqdm: bool
) -> Observations:
    """Return what the engine's model does with the samples, going on from ``partial`` if it can.

    Raises:
        RequestError: a sample cannot be computed.
        CapacityError: there is no memory for ``batch_size`` samples.
        ScaleError: a value was NaN or infinite; names layer and side.
    """
    sequences = samples.sequences
    source = RANDOM if str(job.asked.data) == RANDOM else ""
    observations, num_done = Observations(engine.config.dtype, source), 0
    if partial is not None and partial.observations is not None:
        observations, num_done = partial.observations, partial.num_done
        logger.info("Going on after sample %d of %d: %s", num_done, len(sequences), partial.path)
    bar = tqdm(
        total=len(sequences),
        initial=num_done,
        desc="Calibrating",
        unit="sample",
        disable=not use_tqdm,
    )

    def on_batch(done: int) -> None:
        nonlocal num_done
        bar.update(done - num_done)
        num_done = done
        if partial is not None:
            partial.save_now_and_then(sequences, observations, done)

    with bar:
        try:
            collect(
                engine.runner.model,
                engine.config,
                sequences,
                observations,
                parts=split_samples(sequences, job.asked.held_out_share),
                batch_size=job.asked.batch_size,
                start=num_done,
                on_batch=on_batch,
            )
        except CapacityError as error:
            raise CapacityError(
                f"There is no memory for {min(job.asked.batch_size, len(sequences))} samples of up "
                f"to {max(map(len, sequences))} tokens at once ({error}) Lower batch_size "
                f"(--batch-size) or max_length (--max-length)."
            ) from error
        except KV8Error:
            raise  # it would fail again: there is nothing to go on with
        except BaseException:
            if partial is not None and partial.save(sequences, observations, num_done):
                logger.warning(
                    "Stopped after %d of %d samples. What was seen is kept in %s; the same command "
                    "goes on from there.",
                    num_done,
                    len(sequences),
                    partial.path,
                )
            raise
    return observations
