"""How a checkpoint stores its weights: as plain numbers, as FP8, or in a way kv8 cannot expand.

Quantizing weights is not what kv8 is about. It reads plain weights, and FP8 weights because FP8
KV caches are often published with them; both end up in the model's dtype. A section that concerns
the KV cache alone leaves the weights plain.
"""

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kv8.errors import ModelError
from kv8.scales.declaration import Section, modelopt_section, quantization_section
from kv8.scales.tensors import num_values, read_json, weight_files


class WeightStorage(enum.Enum):
    """What the tensors named ``weight`` hold."""

    PLAIN = "plain"
    FP8 = "fp8"


def loaded_bytes(folder: Path, dtype: str) -> int:
    """Return the memory that the weights in ``folder`` take once every number is a ``dtype``.

    Raises:
        ModelError: a file is missing or damaged.
    """
    size: int = getattr(torch, dtype).itemsize
    return size * num_values(weight_files(folder))


_FP8_ALGORITHMS = ("FP8", "FP8_PB_WO", "FP8_PB_REAL", "FP8_PER_CHANNEL_PER_TOKEN")


def check_weight_storage(folder: Path, config: Mapping[str, Any]) -> WeightStorage:
    """Return how the weights in ``folder`` are stored, as its config.json says.

    Raises:
        ModelError: in a way kv8 cannot expand; names the method and what to do.
    """
    section = quantization_section(config)
    extra = folder / "hf_quant_config.json"
    if section is None and extra.is_file():
        section = modelopt_section(read_json(extra))
    if section is None:
        return WeightStorage.PLAIN
    storage = _storage(section)
    if isinstance(storage, WeightStorage):
        return storage
    raise ModelError(
        f"{folder.name}: its weights are quantized ({storage}, says {section.where}), and kv8 "
        f"reads plain or FP8 weights only. Use the original checkpoint, or save a dequantized copy "
        f"of this one. The KV cache is quantized all the same: --kv-cache-dtype fp8."
    )


def _storage(section: Section) -> WeightStorage | str:
    """Return the storage, or words for the one that kv8 does not know."""
    method, fields = section.method, section.fields
    if method == "compressed-tensors":
        return _compressed_tensors(fields)
    if method.startswith("modelopt"):
        inner = fields.get("quantization")
        algorithm = (inner if isinstance(inner, Mapping) else fields).get("quant_algo")
        return _plain_or_fp8("modelopt", algorithm, _FP8_ALGORITHMS)
    if method == "quark":
        scheme = fields.get("global_quant_config")
        weight = scheme.get("weight") if isinstance(scheme, Mapping) else scheme
        dtype = weight.get("dtype", "unnamed") if isinstance(weight, Mapping) else weight
        return _plain_or_fp8("quark", dtype, ("fp8_e4m3",))
    return WeightStorage.FP8 if method in ("fp8", "fbgemm-fp8") else method


def _plain_or_fp8(method: str, name: Any, fp8_names: Sequence[str]) -> WeightStorage | str:
    if name is None:
        return WeightStorage.PLAIN
    return WeightStorage.FP8 if name in fp8_names else f"{method} {name}"


def _compressed_tensors(fields: Mapping[str, Any]) -> WeightStorage | str:
    sparsity = fields.get("sparsity_config") or {}
    layout = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if layout != "dense":
        return f"compressed-tensors sparsity {layout}"
    if fields.get("transform_config"):
        return "compressed-tensors transform_config: activations must be rotated, too"
    groups = fields.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        return f"compressed-tensors config_groups {groups}"
    schemes = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    for scheme in filter(None, schemes):
        described = scheme if isinstance(scheme, Mapping) else {"type": scheme}
        kind, bits = described.get("type"), described.get("num_bits")
        if (kind, bits) != ("float", 8) or not described.get("symmetric", True):
            return f"compressed-tensors {kind} {bits} bits"
    return WeightStorage.FP8 if any(schemes) else WeightStorage.PLAIN
