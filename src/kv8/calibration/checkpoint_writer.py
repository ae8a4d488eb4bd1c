"""Writes a compressed-tensors checkpoint: a model's own weights, and the scales beside them.

Each scale stands beside its layer's projections as ``<attention module>.k_scale``, in float32:
vLLM keeps it so, and bfloat16 would round it by up to 2^-9, which puts the largest value measured
beyond what the format holds. Shapes are those of llm-compressor: (1,) per tensor, (K, 1, 1) or, for
queries, (H, 1, 1) per head. Zero points are not written; vLLM warns about each.

A layer that reads another layer's keys and values has no scale of its own. vLLM gives it one all
the same, 1.0 unless the checkpoint says otherwise, and decodes what the other layer stored with it;
so a copy of that layer's k and v scale is written under its name too. kv8 accepts such a copy, and
refuses any other number there.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kv8.calibration.checkpoint_config import check_declarable, declare_cache
from kv8.calibration.checkpoint_files import (
    INDEX,
    SourceFiles,
    source_files,
    take_over,
    total_size,
)
from kv8.errors import RequestError
from kv8.formats.base import FP8_E4M3
from kv8.geometry import LayerGeometry, ModelGeometry
from kv8.models.attention_classes import attention_classes
from kv8.models.config import load_config, read_config_json
from kv8.scales.attention_paths import attention_paths
from kv8.scales.provenance import ScalesFileMetadata
from kv8.scales.scale import SIDES, ModelScales, Scale, Side
from kv8.scales.storage import write_whole
from kv8.scales.tensor_writer import CHECKSUM, checksum, write_tensors
from kv8.scales.validity import Strategy


@dataclass(frozen=True)
class CheckpointPlan:
    """Everything a checkpoint takes besides the scales; made, and refused, before calibrating.

    Attributes:
        files: what is taken over.
        config: content of the model's config.json.
        paths: name of each layer's attention module in the checkpoint.
        geometry: the model's.
        attention_class: class name of its attention modules, if queries are to have scales.
    """

    files: SourceFiles
    config: Mapping[str, Any]
    paths: Mapping[int, str]
    geometry: ModelGeometry
    attention_class: str | None


def plan_checkpoint(
    folder: Path, geometry: ModelGeometry, kv_cache_dtype: str, *, queries: bool
) -> CheckpointPlan:
    """Return what a checkpoint made of the model in ``folder`` would consist of.

    Args:
        folder: the model's.
        geometry: its geometry.
        kv_cache_dtype: name of the format the scales are made for.
        queries: whether there will be q scales.

    Raises:
        RequestError: this model, or this format, makes no such checkpoint; says what to do.
        ScaleError: the names of its weights do not tell where scales belong.
        ModelError: a file is missing or damaged.
    """
    if kv_cache_dtype != FP8_E4M3.name:
        raise RequestError(
            f"A compressed-tensors checkpoint declares an {FP8_E4M3.name} cache, and scales made "
            f"for {kv_cache_dtype} would clip in it. Leave checkpoint (--checkpoint) out, or "
            f"calibrate for {FP8_E4M3.name}."
        )
    config = read_config_json(folder)
    check_declarable(folder, config)
    files = source_files(folder)
    paths = attention_paths(files.weights, geometry)
    target = _attention_target(folder, geometry) if queries else None
    return CheckpointPlan(files, config, paths, geometry, target)


def write_checkpoint(
    target: Path,
    plan: CheckpointPlan,
    scales: ModelScales,
    metadata: ScalesFileMetadata,
    strategy: Strategy,
) -> None:
    """Write the checkpoint into the existing folder ``target``.

    Args:
        target: where to.
        plan: from `plan_checkpoint`.
        scales: k and v of every layer that stores them; q of every layer if the plan has queries.
        metadata: how they came about; kept in the header of the shard with the scales.
        strategy: what one scale is per.

    Raises:
        OSError: a file cannot be written; names it, its size and the room there is.
    """
    tensors = dict(_tensors(plan, scales, strategy))
    shard = plan.files.shard_name(len(plan.files.shards))
    take_over(plan.files, target)
    header = {**metadata.as_shard_text(), CHECKSUM: checksum(tensors)}
    write_tensors(target / shard, tensors, header)
    declared = declare_cache(plan.config, strategy, plan.attention_class)
    _write_json(target / "config.json", declared)
    _write_json(target / INDEX, _index(plan.files, tensors, shard))


def _attention_target(folder: Path, geometry: ModelGeometry) -> str:
    """Return the one class that a config group for attention can name."""
    classes = attention_classes(load_config(folder), geometry)
    if len(classes) == 1 and classes[0].endswith("Attention"):
        return classes[0]
    raise RequestError(
        f"q scales are declared for the class of the attention modules, here {', '.join(classes)}, "
        f"and vLLM accepts one class whose name ends with Attention. Calibrate k and v only, or "
        f"leave checkpoint (--checkpoint) out."
    )


def _tensors(
    plan: CheckpointPlan, scales: ModelScales, strategy: Strategy
) -> Iterator[tuple[str, torch.Tensor]]:
    for layer in plan.geometry.layers:
        for side in SIDES:
            scale = _scale(scales, layer, side)
            if scale is not None:
                values = torch.tensor(scale.values, dtype=torch.float32)
                shape = (-1, 1, 1) if strategy == "attn_head" else (1,)
                yield f"{plan.paths[layer.layer]}.{side}_scale", values.reshape(shape)


def _scale(scales: ModelScales, layer: LayerGeometry, side: Side) -> Scale | None:
    return scales.layer(layer.layer if side == "q" else layer.kv_source).side(side)


def _index(files: SourceFiles, tensors: Mapping[str, torch.Tensor], shard: str) -> dict[str, Any]:
    written = {path: files.shard_name(number) for number, path in enumerate(files.shards)}
    weight_map = {name: written[file] for name, file in files.weights.items()}
    weight_map |= dict.fromkeys(tensors, shard)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return {
        "metadata": {"total_size": total_size(files) + num_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    write_whole(path, [f"{text}\n".encode()])
