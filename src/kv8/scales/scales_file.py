"""Scales files: a safetensors file with nothing in it but KV cache scales.

kv8 writes ``layers.<n>.k_scale`` and so on, float32, with metadata that says how the numbers came
about. It reads these and, through the same table of names, the scale tensors any producer writes.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kv8.errors import ModelError, ScaleError
from kv8.geometry import ModelGeometry
from kv8.scales.collect import collect_scales
from kv8.scales.provenance import FORMAT, VERSION, ScalesFileMetadata, is_ours, parse_header
from kv8.scales.scale import SIDES, ModelScales, OriginKind
from kv8.scales.sources import refuse_unusable
from kv8.scales.tensor_writer import CHECKSUM, checksum, write_tensors
from kv8.scales.tensors import file_metadata, tensor_names
from kv8.scales.validity import values_fault


def geometry_fingerprint(geometry: ModelGeometry) -> str:
    """Return 16 hex digits that differ between models whose scales cannot be exchanged."""
    layers = [(x.layer, x.num_heads, x.num_kv_heads, x.head_dim) for x in geometry.layers]
    text = f"{geometry.architecture} {layers}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_scales_file(
    path: Path | str,
    geometry: ModelGeometry,
    weights_fingerprint: Callable[[], str] | None = None,
) -> ModelScales:
    """Return the scales in a safetensors file.

    Unusable q scales are kept as problems, like a checkpoint's; `resolve_scales` decides.

    Another geometry is refused: the numbers fit no head of this model. Other weights of the same
    geometry (a fine-tuned model, the same one with its weights quantized) are a warning: the
    numbers fit and are often good, but only a new calibration could say so.

    Args:
        path: the file.
        geometry: the model the scales must fit.
        weights_fingerprint: gives that of the model's weights; asked only if the file carries one.

    Raises:
        ModelError: the file is missing, damaged (by its checksum, if it has one) or no safetensors
            file.
        ScaleError: it holds anything but usable scales of this model's layers, or was written for
            another model or by a newer kv8.
    """
    file = Path(path)
    if not file.is_file():
        fault = "is not a file" if file.exists() else "is missing"
        raise ModelError(
            f"kv_scales: {file} {fault}. Give a safetensors file of scales, or leave kv_scales "
            f"(--kv-scales) out to use the checkpoint's own."
        )
    header = file_metadata(file)
    if is_ours(header):
        _check_version(file, header.get("version"))
    metadata = parse_header(header, str(file))
    warnings: tuple[str, ...] = ()
    if metadata is not None:
        _check_geometry(file, metadata, geometry)
        warnings = _check_weights(file, metadata, weights_fingerprint)
    found = collect_scales(
        tensor_names((file,)), geometry, OriginKind.FILE, metadata.strategy if metadata else None
    )
    if found.unbound:
        raise ScaleError(
            f"{file} holds {found.unbound[0]}, which is no KV cache scale; a scales file holds "
            f"nothing else. kv8's own names are layers.<n>.q_scale, .k_scale and .v_scale."
        )
    if not found.tensors:
        raise ScaleError(f"{file} holds no scales.")
    bad = [problem for problem in found.scales.problems if problem.side != "q"]
    if bad:
        raise refuse_unusable(bad, "Calibrate again, or remove these entries.")
    made_for = found.scales.made_for if metadata is None else metadata.kv_cache_dtype
    return replace(found.scales, made_for=made_for, warnings=warnings)


def write_scales_file(path: Path | str, scales: ModelScales, metadata: ScalesFileMetadata) -> None:
    """Write ``scales`` to ``path``, whole or not at all; an existing file is replaced.

    Equal scales and metadata give the same bytes.

    Raises:
        ScaleError: there is nothing to write, or a value is no scale.
        OSError: the file cannot be written; names it, its size and the room there is.
    """
    file = Path(path)
    tensors: dict[str, torch.Tensor] = {}
    for layer, sides in scales:
        for side in SIDES:
            scale = sides.side(side)
            if scale is None:
                continue
            fault = values_fault(scale.values)
            if fault:
                raise ScaleError(f"Layer {layer}, {side}: {fault}. Nothing was written to {file}.")
            tensors[f"layers.{layer}.{side}_scale"] = torch.tensor(scale.values)
    if not tensors:
        raise ScaleError(f"There are no scales to write to {file}.")
    write_tensors(file, tensors, {**metadata.as_text(), CHECKSUM: checksum(tensors)})


def _check_version(file: Path, version: str | None) -> None:
    if version != VERSION:
        raise ScaleError(
            f"{file} has version {version!r} of {FORMAT}; this kv8 reads {VERSION!r}. "
            "Update kv8 or write the file again."
        )


def _check_geometry(file: Path, metadata: ScalesFileMetadata, geometry: ModelGeometry) -> None:
    if metadata.geometry and metadata.geometry != geometry_fingerprint(geometry):
        raise ScaleError(
            f"{file} was written for another model ({metadata.model}) than this "
            f"{geometry.architecture}. Calibrate this model."
        )


def _check_weights(
    file: Path, metadata: ScalesFileMetadata, weights_fingerprint: Callable[[], str] | None
) -> tuple[str, ...]:
    if not metadata.weights or weights_fingerprint is None:
        return ()
    if metadata.weights == weights_fingerprint():
        return ()
    return (
        f"The scales in {file} were measured with other weights ({metadata.model}) than this "
        "model's. They are used, but values may be clipped more than they need be: calibrate this "
        "model (kv8 calibrate).",
    )
