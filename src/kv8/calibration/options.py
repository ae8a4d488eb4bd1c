"""What a calibration was asked for, checked on its own; the command line is a view of it."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from kv8.calibration.packing import check_limits
from kv8.calibration.statistic_names import DEFAULT_PERCENTILE, StatisticName, check_statistic
from kv8.errors import RequestError
from kv8.formats.base import FORMATS, KVFormat
from kv8.formats.lookup import get_format
from kv8.scales.validity import Strategy

CalibratedDtype = Literal["fp8", "fp8_e4m3", "fp8_e5m2"]

DEFAULT_HELD_OUT: Final = 0.1
DEFAULT_MAX_LENGTH: Final = 2048

# Options of the engine that have a say in a calibration. The cache it observes is not quantized,
# and everything about serving has no part in it.
ENGINE_OPTIONS: Final = (
    "tokenizer",
    "dtype",
    "attention_backend",
    "device",
    "max_num_batched_tokens",
    "max_num_seqs",
    "kv_cache_memory",
    "seed",
)


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """Options of one calibration.

    Raises:
        RequestError: an option has a value it cannot have; the message lists those it can.
    """

    data: str | Path = _option(
        "",
        'Text to calibrate on: a .txt file; a .jsonl file (lines with "text" or "messages"); a '
        "folder or hub id of a dataset (folder:split, org/name or org/name:config:split; needs "
        "kv8[datasets]); random (random tokens); or self (text the model writes).",
    )
    strategy: Strategy = _option(
        "tensor", "One scale for a layer's keys and one for its values (tensor), or one a head."
    )
    statistic: StatisticName = _option(
        "absmax",
        "What a scale is made from: absmax (nothing measured saturates), percentile, mse (least "
        "squared error of what is stored), or llmcompressor (that library's default, a moving "
        "average, for comparison).",
    )
    percentile: float = _option(
        DEFAULT_PERCENTILE, "Percent of the values that statistic=percentile keeps whole."
    )
    samples: int = _option(512, "Most samples to calibrate on, those held out included.")
    max_length: int | None = _option(
        None,
        f"Most tokens of a sample. Default: {DEFAULT_MAX_LENGTH}, or the model's limit if that is "
        "less.",
    )
    held_out: float | None = _option(
        None,
        "Share of the samples kept apart to judge the scales by. Default: 0.1, and 0 for "
        "llmcompressor, which uses all it is given.",
    )
    kv_cache_dtype: CalibratedDtype = _option(
        "fp8_e4m3", "Format the scales are for; fp8 is short for fp8_e4m3."
    )
    query_scales: bool = _option(
        False,
        "Also give scales for queries, with which kv8 serves with FP8 attention. They are "
        "measured and reported in any case.",
    )
    batch_size: int = _option(8, "Samples computed together.")
    output: str | Path | None = _option(
        None, "Folder to write scales, report and picture to; it must not exist."
    )
    checkpoint: bool = _option(
        False,
        "Make the output folder a model folder too, a compressed-tensors checkpoint with the "
        "scales in it.",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.data, str | Path) or not str(self.data):
            raise RequestError(
                f"data must say what to calibrate on: a file, a data set, random or self; got "
                f"{self.data!r:.80}."
            )
        check_statistic(self.statistic, self.strategy, self.percentile)
        check_limits(
            self.samples, DEFAULT_MAX_LENGTH if self.max_length is None else self.max_length
        )
        for name in ("query_scales", "checkpoint"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        size = self.batch_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise RequestError(f"batch_size must be a whole number of at least 1, got {size!r}.")
        self._check_format()
        self._check_held_out()
        self._check_output()

    @property
    def kv_format(self) -> KVFormat:
        """The format the scales are for."""
        return get_format(self.kv_cache_dtype)

    @property
    def held_out_share(self) -> float:
        """Share of the samples that scales are not made from."""
        if self.held_out is not None:
            return self.held_out
        return 0.0 if self.statistic == "llmcompressor" else DEFAULT_HELD_OUT

    def _check_format(self) -> None:
        if not get_format(str(self.kv_cache_dtype)).quantized:
            quantized = ", ".join(name for name, each in FORMATS.items() if each.quantized)
            raise RequestError(
                f"kv_cache_dtype={self.kv_cache_dtype} takes no scales, so there is nothing to "
                f"calibrate. Allowed: {quantized}."
            )

    def _check_held_out(self) -> None:
        share = self.held_out
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if share is not None and not (number and 0 <= share < 1):
            raise RequestError(
                f"held_out must be a share of at least 0 and less than 1, got {share!r}."
            )

    def _check_output(self) -> None:
        if self.output is not None and not (
            isinstance(self.output, str | Path) and str(self.output)
        ):
            raise RequestError(f"output must be the name of a folder, got {self.output!r:.80}.")
        if self.checkpoint and self.output is None:
            raise RequestError("checkpoint was given, but no output folder to write one to.")


CALIBRATION_FIELDS = {f.name: f for f in fields(CalibrationOptions)}
