"""Samples that the model writes itself, going on from those it wrote before it was broken off."""

import logging
from collections.abc import Sequence

from tqdm import tqdm

from kv8.calibration.job import Job
from kv8.calibration.observations import Observations
from kv8.calibration.partial import PartialResult
from kv8.calibration.sources import Samples
from kv8.calibration.sources_made import text_writer
from kv8.engine.engine import Engine
from kv8.errors import KV8Error

logger = logging.getLogger(__name__)


def write_samples(
    engine: Engine, job: Job, progress: PartialResult | None, *, use_tqdm: bool
) -> Samples:
    """Return the samples that the engine's model writes; ``progress`` keeps those there are.

    Raises:
        EngineError: the model failed while writing.
    """
    texts: list[tuple[int, ...]] = list((progress and progress.samples) or ())
    num_before, nothing = len(texts), Observations(engine.config.dtype)

    def on_texts(so_far: Sequence[Sequence[int]]) -> None:
        texts[:] = map(tuple, so_far)
        if progress is not None:
            progress.save_now_and_then(tuple(texts), nothing, 0)

    total = job.asked.samples * job.max_length
    initial = sum(map(len, texts))
    with tqdm(
        total=total, initial=initial, desc="Writing", unit="token", disable=not use_tqdm
    ) as bar:
        writer = text_writer(
            engine,
            seed=job.engine_options.seed,
            on_step=bar.update,
            written=tuple(texts),
            on_texts=on_texts,
        )
        try:
            samples = job.load_samples(engine.tokenizer, writer)
        except KV8Error:
            raise  # it would fail again: there is nothing to go on with
        except BaseException:
            if progress is not None and texts and progress.save(tuple(texts), nothing, 0):
                logger.warning(
                    "Stopped after writing %d of %d texts. They are kept in %s; the same command "
                    "goes on from there.",
                    len(texts),
                    job.asked.samples,
                    progress.path,
                )
            raise
    if progress is not None and num_before < len(texts):  # writing takes longer than all the rest
        progress.save(samples.sequences, nothing, 0)
    return samples
