"""``kv8 calibrate MODEL --data SOURCE --output DIR``: measure a text, write scales and a report."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv8.calibration.options import CALIBRATION_FIELDS, ENGINE_OPTIONS
from kv8.cli.options_view import ModelArgument, calibration_flags, engine_flags, with_flags
from kv8.cli.output import note, output_flags, say, say_json, start_logging
from kv8.errors import RequestError

if TYPE_CHECKING:
    from kv8.calibration.calibrate import Calibration

_ENGINE_TEXTS = {"seed": "Seed of random tokens, and of text the model writes."}
_PROMPT = "Once upon a time"
_HELP = {name: field.metadata["help"] for name, field in CALIBRATION_FIELDS.items()}


@with_flags(
    calibration=calibration_flags(without={"data", "output"}),
    engine=engine_flags(only=ENGINE_OPTIONS, texts=_ENGINE_TEXTS),
    output=output_flags(),
)
def calibrate(
    model: ModelArgument,
    data: Annotated[list[str], typer.Option("--data", metavar="SOURCE", help=_HELP["data"])],
    folder: Annotated[str, typer.Option("--output", metavar="DIR", help=_HELP["output"])],
    *,
    calibration: dict[str, Any],
    engine: dict[str, Any],
    output: dict[str, Any],
) -> None:
    """Measure a model's keys and values, and make scales.

    Reads text with the model, notes how large keys, values and queries become in every layer, and
    writes a folder with kv_scales.safetensors, which --kv-scales of the other commands takes, and
    a report on it (report.json, report.png). With --checkpoint it is a model folder besides, which
    other engines load too. For example:

    kv8 calibrate smollm2 --data texts.txt --output scales

    Interrupted, it keeps what it has seen beside the folder; the same command goes on from there.

    Exit codes: 0 done; 1 failed (the disk is full, too); 2 refused; 130 or 143 interrupted by
    ctrl-C or SIGTERM.
    """
    start_logging(output)
    if len(data) != 1:
        raise RequestError(
            f"--data was given {len(data)} times: {', '.join(data)}. Give one source: files in a "
            f"folder are one (with kv8[datasets]), and so are texts written one after another."
        )
    from kv8.calibration.calibrate import calibrate

    result = calibrate(
        model, data[0], output=folder, use_tqdm=sys.stderr.isatty(), **calibration, **engine
    )
    if output["json"]:
        say_json({**result.report.as_dict(), "files": [str(file) for file in result.files]})
    else:
        say(str(result))
    for warning in result.report.warnings:
        note(f"kv8: warning: {warning}")
    note(_closing(model, Path(folder).expanduser(), result))


def _closing(model: str, folder: Path, result: "Calibration") -> str:
    """Return what was written, and how to try it."""
    from kv8.calibration.outputs import SCALES_FILE

    names = ", ".join(str(file.relative_to(folder)) for file in result.files)
    words = ["kv8", "generate", str(folder), _PROMPT]
    if not (folder / "config.json").exists():
        kv_format = result.report.conditions.kv_format.name
        words = ["kv8", "generate", model, _PROMPT, "--kv-cache-dtype", kv_format]
        words += ["--kv-scales", str(folder / SCALES_FILE)]
    return f"Wrote {folder}: {names}\nTry it: {shlex.join(words)}"
