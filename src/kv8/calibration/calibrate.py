"""From a model and a text to scales, a report on them, and the files that carry both."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch

from kv8._version import __version__
from kv8.calibration.interrupts import raise_noticed, raised_interrupts
from kv8.calibration.job import Job, prepare
from kv8.calibration.observations import MEASURED, Observations
from kv8.calibration.observe import observe
from kv8.calibration.output_lock import locked_output
from kv8.calibration.outputs import write_outputs
from kv8.calibration.partial import PartialResult
from kv8.calibration.picture import can_draw, draw_report
from kv8.calibration.report import CalibrationReport, Conditions, make_report
from kv8.calibration.scales import make_scales
from kv8.calibration.sources import Samples
from kv8.calibration.statistic_names import describe_statistic
from kv8.calibration.written_samples import write_samples
from kv8.engine.engine import Engine
from kv8.errors import ScaleError
from kv8.models.fingerprint import weights_fingerprint
from kv8.models.tokenizer import load_tokenizer
from kv8.scales.provenance import ScalesFileMetadata
from kv8.scales.scale import ModelScales
from kv8.scales.scales_file import geometry_fingerprint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Calibration:
    """What a calibration found.

    Attributes:
        scales: k and v of every layer that stores them, and q of every layer if asked for.
        report: what each scale is and what it does to text it was not made from; queries included.
        samples: what it was measured on.
        files: what was written, if an output folder was given.
    """

    scales: ModelScales
    report: CalibrationReport
    samples: Samples
    files: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return str(self.report)


def calibrate(
    model: str | Path, data: str | Path, *, use_tqdm: bool = True, **options: Any
) -> Calibration:
    """Measure a model's keys, values and queries on a text, and make scales for its cache.

    ``kv8.calibrate("smollm2", "texts.jsonl", output="smollm2-scales")``

    A calibration that has an output and is interrupted, by ctrl-C or SIGTERM, keeps what it has
    seen beside that; the same call goes on from there, and its result is that of an uninterrupted
    one. SIGTERM, where nobody else handles it, ends the process with exit code 143 then.

    Args:
        model: folder, ``.gguf`` file, hub id or built-in name.
        data: a text, a data set, ``random`` or ``self``; see `load_samples`.
        use_tqdm: whether to show a progress bar on stderr.
        options: fields of `kv8.calibration.options.CalibrationOptions` (``strategy``,
            ``statistic``, ``samples``, ``max_length``, ``output``, ``checkpoint`` ...), and those
            of `kv8.options.EngineOptions` that its `ENGINE_OPTIONS` lists (``dtype``, ``seed``).

    Raises:
        RequestError: an option is unknown or does not fit, the text cannot be read, or another
            process is at work on the output; before weights are, where that is possible.
        ScaleError: a layer was not observed, or a value was not finite; names it.
        OutputError: the results could not be written.
    """
    job = prepare(model, data, options)
    if job.output is not None and not can_draw():
        logger.warning(
            "There will be no picture beside the report: matplotlib, which draws it, is not "
            "installed (pip install 'kv8[report]')."
        )
    alone = nullcontext() if job.output is None else locked_output(job.output)
    with raised_interrupts(), alone:
        return _calibrate(job, use_tqdm=use_tqdm)


def _calibrate(job: Job, *, use_tqdm: bool) -> Calibration:
    samples = None
    if not job.writes_itself:
        samples = job.load_samples(load_tokenizer(job.source, job.engine_options.tokenizer))
    progress = None if job.output is None else PartialResult(job.output, job.facts(samples))
    engine = Engine(job.engine_options)
    if samples is None:
        samples = write_samples(engine, job, progress, use_tqdm=use_tqdm)
    try:
        observations = observe(engine, job, samples, progress, use_tqdm=use_tqdm)
        return _conclude(engine, job, samples, observations, progress)
    except ScaleError:
        if progress is not None:
            progress.remove()  # going on from it would end in the same error
        raise


def _conclude(
    engine: Engine,
    job: Job,
    samples: Samples,
    observations: Observations,
    progress: PartialResult | None,
) -> Calibration:
    """Make scales and their report, write both if there is an output, and drop the progress.

    Whatever prevents that, be it ctrl-C, the work need not be redone.
    """
    try:
        raise_noticed()
        measured, report = _results(engine, job, samples, observations)
        scales = measured if job.asked.query_scales else _without_queries(measured)
        files = _write(engine, job, scales, report, observations) if job.output else []
    except ScaleError:
        raise
    except BaseException as error:
        if progress is not None:
            _keep(error, job, samples, observations, progress)
        raise
    if progress is not None:
        progress.remove()
    return Calibration(scales, report, samples, tuple(files))


def _results(
    engine: Engine, job: Job, samples: Samples, observations: Observations
) -> tuple[ModelScales, CalibrationReport]:
    asked, config = job.asked, engine.config
    measured = make_scales(
        observations,
        config.geometry,
        asked.kv_format,
        strategy=asked.strategy,
        statistic=asked.statistic,
        percentile=asked.percentile,
    )
    conditions = Conditions(
        model=config.source.name,
        samples=samples,
        kv_format=asked.kv_format,
        strategy=asked.strategy,
        statistic=asked.statistic,
        percentile=asked.percentile,
    )
    return measured, make_report(observations, measured, config.geometry, conditions)


def _write(
    engine: Engine,
    job: Job,
    scales: ModelScales,
    report: CalibrationReport,
    observations: Observations,
) -> list[Path]:
    assert job.output is not None, "there is a folder to write to"
    return write_outputs(
        job.output,
        scales=scales,
        metadata=_metadata(engine, job, observations),
        report=report.as_dict(),
        draw=partial(draw_report, report) if can_draw() else None,
        source=engine.config.source,
        geometry=engine.config.geometry,
        checkpoint=job.asked.checkpoint,
    )


def _keep(
    error: BaseException,
    job: Job,
    samples: Samples,
    observations: Observations,
    progress: PartialResult,
) -> None:
    """Save all that was measured, unless ctrl-C came when everything was written."""
    assert job.output is not None, "there is no progress without an output"
    # The place is locked, so a folder there is ours; only somebody's else is refused.
    if job.output.exists() and not isinstance(error, Exception):
        progress.remove()
    elif progress.save(samples.sequences, observations, len(samples.sequences)):
        logger.warning(
            "All was measured, and is kept in %s; the same command goes on from there.",
            progress.path,
        )


def _without_queries(scales: ModelScales) -> ModelScales:
    stored = {number: replace(layer, q=None) for number, layer in scales if layer.k is not None}
    return replace(scales, layers=stored)


def _metadata(engine: Engine, job: Job, observations: Observations) -> ScalesFileMetadata:
    config, asked = engine.config, job.asked
    return ScalesFileMetadata(
        producer=f"kv8 {__version__}",
        statistic=describe_statistic(asked.statistic, asked.percentile),
        num_tokens=sum(observations.num_tokens[part] for part in MEASURED),
        model=config.source.name,
        geometry=geometry_fingerprint(config.geometry),
        weights=weights_fingerprint(config.source.folder),
        strategy=asked.strategy,
        source=observations.source,
        kv_cache_dtype=asked.kv_format.name,
        versions={"torch": torch.__version__, "safetensors": safetensors.__version__},
    )
