"""How a checkpoint stores its weights: as plain numbers, as FP8, or in a way kv8 cannot expand.

Quantizing weights is not what kv8 is about. It reads plain weights, and FP8 weights because FP8
KV caches are often published with them; both end up in the model's dtype. A section that concerns
the KV cache alone leaves the weights plain.
"""

import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kv8.errors import ModelError


class WeightStorage(enum.Enum):
    """What the tensors named ``weight`` hold."""

    PLAIN = "plain"
    FP8 = "fp8"


_FP8_ALGORITHMS = {"FP8", "FP8_PB_WO", "FP8_PB_REAL", "FP8_PER_CHANNEL_PER_TOKEN"}


def check_weight_storage(folder: Path, config: Mapping[str, Any]) -> WeightStorage:
    """Return how the weights in ``folder`` are stored, as its config.json says.

    Raises:
        ModelError: in a way kv8 cannot expand; names the method and what to do.
    """
    section, file = _quantization_section(folder, config)
    if section is None:
        return WeightStorage.PLAIN
    method = str(section.get("quant_method", "unnamed")).lower().replace("_", "-")
    storage = _storage(method, section)
    if isinstance(storage, WeightStorage):
        return storage
    raise ModelError(
        f"{folder.name}: its weights are quantized ({storage}, says {file}), and kv8 reads plain "
        f"or FP8 weights only. Use the original checkpoint, or save a dequantized copy of this "
        f"one. The KV cache is quantized all the same: --kv-cache-dtype fp8."
    )


def _quantization_section(
    folder: Path, config: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, str]:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for field in ("quantization_config", "compression_config"):
            if isinstance(part.get(field), Mapping):
                return part[field], "config.json"
    path = folder / "hf_quant_config.json"
    if path.is_file():
        try:
            section = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read as JSON: {error}") from None
        if isinstance(section, dict):
            return {"quant_method": "modelopt", **section}, path.name
    return None, ""


def _storage(method: str, section: Mapping[str, Any]) -> WeightStorage | str:
    """Return the storage, or words for the one that kv8 does not know."""
    if method == "compressed-tensors":
        return _compressed_tensors(section)
    if method.startswith("modelopt"):
        inner = section.get("quantization")
        algorithm = (inner if isinstance(inner, Mapping) else section).get("quant_algo")
        if algorithm is None:
            return WeightStorage.PLAIN
        return WeightStorage.FP8 if algorithm in _FP8_ALGORITHMS else f"modelopt {algorithm}"
    if method == "quark":
        weight = (section.get("global_quant_config") or {}).get("weight")
        if weight is None:
            return WeightStorage.PLAIN
        dtype = weight.get("dtype") if isinstance(weight, Mapping) else weight
        return WeightStorage.FP8 if dtype == "fp8_e4m3" else f"quark {dtype}"
    if method in ("fp8", "fbgemm-fp8"):
        return WeightStorage.FP8
    return method


def _compressed_tensors(section: Mapping[str, Any]) -> WeightStorage | str:
    groups = section.get("config_groups") or {}
    schemes = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    for scheme in schemes:
        if scheme is None:
            continue
        kind, bits = scheme.get("type"), scheme.get("num_bits")
        if (kind, bits) != ("float", 8) or not scheme.get("symmetric", True):
            return f"compressed-tensors {kind} {bits} bits"
    return WeightStorage.FP8 if any(schemes) else WeightStorage.PLAIN
