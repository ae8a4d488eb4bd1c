"""The ``quantization_config`` of a written checkpoint: what compressed-tensors readers go by.

Only what they need stands in it. Fields that compressed-tensors gained over time (``scale_dtype``,
``zp_dtype``) are left out: older versions refuse what they do not know, newer ones fill them in.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kv8.errors import RequestError
from kv8.scales.declaration import is_attention_group, quantization_section
from kv8.scales.validity import Strategy

_KEYS = ("quantization_config", "compression_config")


def check_declarable(folder: Path, config: Mapping[str, Any]) -> None:
    """Check that a cache scheme can be added to what ``config`` (config.json's content) declares.

    compressed-tensors' own sections can: they have a place for it beside the weights' scheme.
    Readers of other methods look for other names, shapes and fields, so that a checkpoint of theirs
    with our scales in it would load without them, or not at all.

    Raises:
        RequestError: the checkpoint declares another method.
    """
    section = quantization_section(config)
    extra = folder / "hf_quant_config.json"
    method = section.method if section else "modelopt" if extra.is_file() else None
    where = section.where if section else extra.name
    if method is not None and method != "compressed-tensors":
        raise RequestError(
            f"{folder.name} is quantized by {method} ({where}), and a checkpoint with KV cache "
            f"scales can be made of plain weights and of compressed-tensors FP8 weights only: "
            f"readers of {method} take other names and shapes. Leave checkpoint (--checkpoint) out "
            f"and give kv8 the scales file with kv_scales (--kv-scales), which works with any."
        )


def declare_cache(
    config: Mapping[str, Any], strategy: Strategy, attention_class: str | None
) -> dict[str, Any]:
    """Return ``config`` (config.json's content) with an FP8 cache declared; the rest is kept.

    Args:
        config: must have passed `check_declarable`.
        strategy: what one scale is per.
        attention_class: class name of the model's attention modules, if queries have scales too.
            vLLM passes over an attention group with this one target, and refuses any other.
    """
    changed = copy.deepcopy(dict(config))
    holder, key = _place(changed)
    section = holder.get(key) or {"config_groups": {}, "format": "dense", "ignore": []}
    groups = section.get("config_groups") or {}
    groups = {name: group for name, group in groups.items() if not is_attention_group(group)}
    if attention_class is not None:
        groups[_free_name(groups)] = {
            "targets": [attention_class],
            "input_activations": _scheme(strategy),
            "output_activations": None,
            "weights": None,
        }
    holder[key] = {
        **section,
        "quant_method": "compressed-tensors",
        "quantization_status": section.get("quantization_status", "compressed"),
        "config_groups": groups,
        "kv_cache_scheme": _scheme(strategy),
    }
    return changed


def _scheme(strategy: Strategy) -> dict[str, Any]:
    return {
        "type": "float",
        "num_bits": 8,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "block_structure": None,
        "actorder": None,
    }


def _place(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return where the section stands, or is to stand: the object and the key in it."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in _KEYS:
            if holder.get(key):
                return holder, key
    return config, _KEYS[0]


def _free_name(groups: Mapping[str, Any]) -> str:
    number = 0
    while f"group_{number}" in groups:
        number += 1
    return f"group_{number}"
