"""A calibration before its work begins: what was asked, checked against the model's files."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kv8._version import __version__
from kv8.calibration.options import (
    CALIBRATION_FIELDS,
    DEFAULT_MAX_LENGTH,
    ENGINE_OPTIONS,
    CalibrationOptions,
)
from kv8.calibration.outputs import check_outputs
from kv8.calibration.partial_facts import Facts
from kv8.calibration.sources import RANDOM, SELF, Samples, load_samples
from kv8.calibration.sources_made import WriteText
from kv8.engine.devices import resolve_device
from kv8.errors import RequestError
from kv8.geometry import ModelGeometry
from kv8.models.config import load_config
from kv8.models.fingerprint import weights_fingerprint
from kv8.models.geometry import read_geometry
from kv8.models.source import ModelSource, resolve_source
from kv8.options import OPTION_FIELDS, EngineOptions


@dataclass(frozen=True)
class Job:
    """One calibration to do.

    Attributes:
        asked: the calibration's own options.
        engine_options: of the engine whose model is observed; its cache is not quantized.
        source: the model's files.
        output: folder to write to, or `None`.
        max_length: most tokens of a sample: as asked, or what fits the model.
    """

    asked: CalibrationOptions
    engine_options: EngineOptions
    source: ModelSource
    output: Path | None
    max_length: int

    @property
    def writes_itself(self) -> bool:
        """Whether the model writes the text that it is calibrated on."""
        return str(self.asked.data) == SELF

    def load_samples(self, tokenizer: Any, write_text: WriteText | None = None) -> Samples:
        """Return the samples; ``write_text`` writes them if the model is to.

        Raises:
            RequestError: the text cannot be read.
        """
        return load_samples(
            self.asked.data,
            tokenizer,
            samples=self.asked.samples,
            max_length=self.max_length,
            seed=self.engine_options.seed,
            write_text=write_text,
        )

    def facts(self, samples: Samples | None) -> Facts:
        """Return all that decides what will be observed, by names a person understands.

        ``samples`` are `None` if they are still to be written by the model.
        """
        asked, options = self.asked, self.engine_options
        written = f"{asked.samples} samples of {self.max_length} tokens, seed {options.seed}"
        decisive: dict[str, Any] = {
            "kv8 version": __version__,
            "torch version": torch.__version__,
            "device": resolve_device(options.device)[0].type,
            "model": weights_fingerprint(self.source.folder),
            "tokenizer": options.tokenizer or "the model's",
            "data": written if samples is None else samples.digest,
            "dtype": options.kv_cache_dtype,
            "attention_backend": options.attention_backend,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "batch_size": min(asked.batch_size, asked.samples),  # more makes no difference
            "held_out": asked.held_out_share,
        }
        data = {"data": asked.data, "samples": asked.samples, "max_length": self.max_length}
        if str(asked.data) in (RANDOM, SELF):
            data["seed"] = options.seed
        return Facts.of(decisive, {"data": data, "model": {"model": options.model}})


def prepare(model: str | Path, data: str | Path, options: Mapping[str, Any]) -> Job:
    """Return the job that `kv8.calibration.calibrate.calibrate` is to do; no weights are read.

    Raises:
        RequestError: an option is unknown, or does not fit the model; the output folder exists.
    """
    known = (*(name for name in CALIBRATION_FIELDS if name != "data"), *ENGINE_OPTIONS)
    for option in options:
        if option not in known:
            raise RequestError(_unknown(option, known))
    own = {name: value for name, value in options.items() if name in CALIBRATION_FIELDS}
    others = {name: value for name, value in options.items() if name not in CALIBRATION_FIELDS}
    name = str(model) if isinstance(model, Path) else model
    asked, engine_options = (
        CalibrationOptions(data=data, **own),
        EngineOptions(model=name, **others),
    )

    source = resolve_source(engine_options.model)
    geometry = read_geometry(load_config(source.folder))
    output = None if asked.output is None else Path(asked.output).expanduser()
    if output is not None:
        check_outputs(
            output,
            source=source,
            geometry=geometry,
            checkpoint=asked.checkpoint,
            kv_cache_dtype=asked.kv_format.name,
            queries=asked.query_scales,
        )
    max_length = _max_length(asked, geometry, source)
    return Job(
        asked=asked,
        engine_options=_unquantized(engine_options, geometry, max_length),
        source=source,
        output=output,
        max_length=max_length,
    )


def _max_length(asked: CalibrationOptions, geometry: ModelGeometry, source: ModelSource) -> int:
    if asked.max_length is None:
        return min(DEFAULT_MAX_LENGTH, geometry.max_position)
    if asked.max_length > geometry.max_position:
        raise RequestError(
            f"max_length={asked.max_length} is longer than {source.name} can read: at most "
            f"{geometry.max_position} tokens. Give no more, or leave max_length (--max-length) out."
        )
    return asked.max_length


def _unquantized(options: EngineOptions, geometry: ModelGeometry, max_length: int) -> EngineOptions:
    """Return options for an engine whose cache loses nothing and holds the longest sample."""
    dtype: Any = geometry.model_dtype if options.dtype == "auto" else options.dtype
    return replace(
        options, kv_cache_dtype=dtype, enable_prefix_caching=False, max_model_len=max_length
    )


def _unknown(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    why = "does not concern a calibration" if name in OPTION_FIELDS else "is not known"
    return f"The option {name!r} {why}.{hint} Options: {', '.join(known)}."
