"""Scales files: a safetensors file with nothing in it but KV cache scales.

kv8 writes ``layers.<n>.k_scale`` and so on, float32, with metadata that says how the numbers came
about. It reads these and, through the same table of names, the scale tensors any producer writes.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save

from kv8.errors import ModelError, ScaleError
from kv8.geometry import ModelGeometry
from kv8.scales.collect import collect_scales
from kv8.scales.scale import SIDES, ModelScales, OriginKind
from kv8.scales.sources import refuse_unusable
from kv8.scales.tensors import file_metadata, tensor_names
from kv8.scales.validity import values_fault

FORMAT = "kv8-scales"
VERSION = "1"


@dataclass(frozen=True)
class ScalesFileMetadata:
    """How the scales of a file came about; written as text into the file's header.

    Attributes:
        producer: program and version that measured them.
        statistic: what they are made from (``absmax / 448``).
        num_tokens: tokens they were measured on.
        model: which model, for people.
        geometry: `geometry_fingerprint` of the model, or empty to have none checked.
        versions: versions of the libraries involved.
    """

    producer: str
    statistic: str
    num_tokens: int
    model: str
    geometry: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def as_text(self) -> dict[str, str]:
        """Return the header entries."""
        entries = {
            "format": FORMAT,
            "version": VERSION,
            "producer": self.producer,
            "statistic": self.statistic,
            "num_tokens": str(self.num_tokens),
            "model": self.model,
            "geometry": self.geometry,
            **{f"version_of_{name}": text for name, text in self.versions.items()},
        }
        return {key: text for key, text in entries.items() if text}


def geometry_fingerprint(geometry: ModelGeometry) -> str:
    """Return 16 hex digits that differ between models whose scales cannot be exchanged."""
    layers = [(x.layer, x.num_heads, x.num_kv_heads, x.head_dim) for x in geometry.layers]
    text = f"{geometry.architecture} {layers}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read_scales_file(path: Path | str, geometry: ModelGeometry) -> ModelScales:
    """Return the scales in a safetensors file.

    Unusable q scales are kept as problems, like a checkpoint's; `resolve_scales` decides.

    Raises:
        ModelError: the file is missing, damaged or no safetensors file.
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
    _check_metadata(file, file_metadata(file), geometry)
    found = collect_scales(tensor_names((file,)), geometry, OriginKind.FILE)
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
    return found.scales


def write_scales_file(path: Path | str, scales: ModelScales, metadata: ScalesFileMetadata) -> None:
    """Write ``scales`` to ``path``, whole or not at all; an existing file is replaced.

    Raises:
        ScaleError: there is nothing to write, or a value is no scale.
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
    _replace(file, save(tensors, metadata.as_text()))


def _check_metadata(file: Path, found: Mapping[str, str], geometry: ModelGeometry) -> None:
    if found.get("format") != FORMAT:
        return
    if found.get("version") != VERSION:
        raise ScaleError(
            f"{file} has version {found.get('version')!r} of {FORMAT}; this kv8 reads {VERSION!r}. "
            "Update kv8 or write the file again."
        )
    written_for = found.get("geometry", "")
    if written_for and written_for != geometry_fingerprint(geometry):
        raise ScaleError(
            f"{file} was written for another model ({found.get('model', 'unnamed')}) than this "
            f"{geometry.architecture}. Calibrate this model."
        )


def _replace(file: Path, content: bytes) -> None:
    """Write beside ``file`` and rename, so that no reader ever sees half a file."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        temporary.replace(file)
    except OSError as error:
        raise ScaleError(f"{file} cannot be written: {error}.") from error
    finally:
        temporary.unlink(missing_ok=True)
