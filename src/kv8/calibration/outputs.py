"""What a calibration leaves behind: scales file, report, picture and, if asked, a checkpoint.

Everything is written aside, read again by kv8's own readers, compared number by number, and only
then renamed into place, as one folder.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kv8.calibration.checkpoint_files import require_room
from kv8.calibration.checkpoint_writer import CheckpointPlan, plan_checkpoint, write_checkpoint
from kv8.calibration.new_folder import check_new_folder, new_folder
from kv8.errors import OutputError, ScaleError
from kv8.geometry import ModelGeometry
from kv8.models.config import load_config
from kv8.models.fingerprint import weights_fingerprint
from kv8.models.geometry import read_geometry
from kv8.models.source import ModelSource
from kv8.models.source_folder import check_folder
from kv8.scales.checkpoint import read_checkpoint
from kv8.scales.provenance import ScalesFileMetadata
from kv8.scales.scale import SIDES, ModelScales
from kv8.scales.scales_file import read_scales_file, write_scales_file
from kv8.scales.storage import explained_failures, write_whole
from kv8.scales.tensors import tensor_names, weight_files
from kv8.scales.wording import layer_list

SCALES_FILE = "kv_scales.safetensors"
REPORT_FILE = "report.json"
PICTURE_FILE = "report.png"


def check_outputs(
    folder: Path,
    *,
    source: ModelSource,
    geometry: ModelGeometry,
    checkpoint: bool,
    kv_cache_dtype: str,
    queries: bool = True,
) -> None:
    """Refuse, before anything is measured, what `write_outputs` could not write afterwards.

    Raises:
        RequestError: the folder exists or cannot be made, or no checkpoint can be made of this
            model; says what to do.
        ScaleError: the names of its weights do not tell where scales belong.
        OutputError: the disk is too full for the weights.
    """
    check_new_folder(folder)
    if checkpoint:
        plan = plan_checkpoint(source.folder, geometry, kv_cache_dtype, queries=queries)
        require_room(plan.files, folder.absolute().parent)


def write_outputs(
    folder: Path,
    *,
    scales: ModelScales,
    metadata: ScalesFileMetadata,
    report: Mapping[str, Any],
    source: ModelSource,
    geometry: ModelGeometry,
    draw: Callable[[Path], None] | None = None,
    checkpoint: bool = False,
) -> list[Path]:
    """Write the folder of a calibration's results; return its files.

    Args:
        folder: must not exist.
        scales: k and v of every layer that stores them, and q of every layer or of none, with
            ``metadata.strategy`` values each.
        metadata: how they came about.
        report: what goes into ``report.json``.
        source: the model they are for.
        geometry: its geometry.
        draw: draws ``report.png``, if there is to be one.
        checkpoint: whether the folder is to be a model folder too, with the scales in it.

    Raises:
        RequestError: as `check_outputs`.
        ScaleError: a layer lacks a scale, or a value is none.
        OutputError: writing failed, or what was read back differs; nothing is left behind.
    """
    _require_complete(scales, geometry)
    metadata = metadata.with_notes(scales)
    plan = None
    if checkpoint:
        queries = _has_queries(scales)
        plan = plan_checkpoint(source.folder, geometry, metadata.kv_cache_dtype, queries=queries)
    with new_folder(folder) as partial:
        write_scales_file(partial / SCALES_FILE, scales, metadata)
        _check_scales_file(partial / SCALES_FILE, scales, source, geometry)
        text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
        write_whole(partial / REPORT_FILE, [f"{text}\n".encode()])
        if draw is not None:
            with explained_failures(partial / PICTURE_FILE):
                draw(partial / PICTURE_FILE)
        if plan is not None:
            if metadata.strategy is None:
                raise ScaleError("A checkpoint declares what one scale is per: give a strategy.")
            write_checkpoint(partial, plan, scales, metadata, metadata.strategy)
            _check_checkpoint(partial, plan, scales, source)
        names = sorted(path.relative_to(partial) for path in partial.rglob("*") if path.is_file())
    return [folder / name for name in names]


def _has_queries(scales: ModelScales) -> bool:
    return any(layer.q is not None for _, layer in scales)


def _require_complete(scales: ModelScales, geometry: ModelGeometry) -> None:
    """Raise unless every cache has both scales, and queries have them everywhere or nowhere."""
    for side in SIDES:
        layers = geometry.layers if side == "q" else geometry.kv_layers
        lacking = [n.layer for n in layers if scales.layer(n.layer).side(side) is None]
        if lacking and (side != "q" or _has_queries(scales)):
            raise ScaleError(
                f"There is no {side} scale for {layer_list(lacking)}; nothing was written."
            )


def _check_scales_file(
    file: Path, scales: ModelScales, source: ModelSource, geometry: ModelGeometry
) -> None:
    found = read_scales_file(file, geometry, lambda: weights_fingerprint(source.folder))
    if found.warnings:
        raise OutputError(f"{file.name} is not for {source.name}'s weights; nothing was left.")
    _compare(scales, found, file.name)


def _check_checkpoint(
    folder: Path, plan: CheckpointPlan, scales: ModelScales, source: ModelSource
) -> None:
    """Read the checkpoint as kv8 would to serve it, and compare with what was to be written."""
    check_folder(folder)
    found = read_checkpoint(folder, plan.geometry)
    declaration = found.declaration
    if declaration is None or declaration.refusal:
        why = declaration.refusal if declaration else "no declaration"
        raise OutputError(f"The written config.json declares no FP8 cache ({why}).")
    if declaration.queries is not _has_queries(scales):
        raise OutputError("The written config.json and the scales differ about queries.")
    _compare(scales, found.scales, "the written checkpoint")
    weights = set(tensor_names(weight_files(folder))) - found.tensors
    if weights != set(plan.files.weights):
        raise OutputError("The written checkpoint has other weights than the model.")
    if weights_fingerprint(folder) != weights_fingerprint(source.folder):
        raise OutputError("The weights of the written checkpoint are not those of the model.")
    if read_geometry(load_config(folder)).layers != plan.geometry.layers:
        raise OutputError("The written config.json describes another model.")


def _compare(wanted: ModelScales, found: ModelScales, what: str) -> None:
    """Raise unless both hold the same numbers for the same layers and sides."""
    for layer in sorted({*wanted.layers, *found.layers}):
        for side in SIDES:
            one, other = wanted.layer(layer).side(side), found.layer(layer).side(side)
            numbers = tuple(scale.values if scale else None for scale in (one, other))
            if numbers[0] != numbers[1]:
                raise OutputError(
                    f"Layer {layer}, {side}: {numbers[0]} was to be written, {numbers[1]} was "
                    f"read back from {what}. Nothing was left behind."
                )
