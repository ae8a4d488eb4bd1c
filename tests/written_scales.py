"""Scales as a calibration would make them, and outputs written from them, for tests."""

from pathlib import Path
from typing import Any

import torch

from kv8.calibration.outputs import write_outputs
from kv8.geometry import ModelGeometry
from kv8.models.config import load_config
from kv8.models.fingerprint import weights_fingerprint
from kv8.models.geometry import read_geometry
from kv8.models.source import resolve_source
from kv8.scales.collect import by_layer
from kv8.scales.provenance import ScalesFileMetadata
from kv8.scales.scale import ModelScales, Origin, OriginKind, Scale, Side
from kv8.scales.scales_file import geometry_fingerprint
from kv8.scales.validity import Strategy


def geometry_in(folder: Path) -> ModelGeometry:
    """Return the geometry of the model in ``folder``."""
    return read_geometry(load_config(folder))


def made_up_scales(
    geometry: ModelGeometry, strategy: Strategy = "tensor", sides: str = "kv", seed: int = 0
) -> ModelScales:
    """Return float32 scales of ordinary size, all different, for all that have a use for them."""
    generator = torch.Generator().manual_seed(seed)
    origin = Origin(OriginKind.CALIBRATION, "4,096 tokens, absmax")
    scales: dict[tuple[int, Side], Scale] = {}
    for layer in geometry.layers:
        for side in sides:
            if side == "q" or layer.owns_kv:
                heads = layer.num_heads if side == "q" else layer.num_kv_heads
                count = heads if strategy == "attn_head" else 1
                values = tuple((0.01 + torch.rand(count, generator=generator) / 10).tolist())
                scales[layer.layer, side] = Scale(values, origin)  # type: ignore[index]
    return ModelScales(by_layer(scales))


def metadata_for(folder: Path, strategy: Strategy = "tensor", **more: Any) -> ScalesFileMetadata:
    """Return what the files of a calibration of the model in ``folder`` say of it."""
    fields = {
        "producer": "kv8 test",
        "statistic": "absmax",
        "num_tokens": 4096,
        "model": folder.name,
        "geometry": geometry_fingerprint(geometry_in(folder)),
        "weights": weights_fingerprint(folder),
        "strategy": strategy,
    }
    return ScalesFileMetadata(**(fields | more))


def write(
    model: Path,
    folder: Path,
    *,
    strategy: Strategy = "tensor",
    sides: str = "kv",
    checkpoint: bool = True,
    **more: Any,
) -> ModelScales:
    """Write the outputs of a made-up calibration of ``model`` to ``folder``; return its scales."""
    geometry = geometry_in(model)
    arguments: dict[str, Any] = {
        "scales": made_up_scales(geometry, strategy, sides),
        "metadata": metadata_for(model, strategy),
        "report": {"layers": []},
        "source": resolve_source(str(model)),
        "geometry": geometry,
        "checkpoint": checkpoint,
    } | more
    write_outputs(folder, **arguments)
    scales: ModelScales = arguments["scales"]
    return scales
