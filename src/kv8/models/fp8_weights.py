"""Expands weights stored as FP8 into the model's dtype: ``weight * scale``, nothing more.

Such checkpoints often declare that activations are to be quantized too; kv8 computes with plain
activations, which only comes closer to the original model.
"""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kv8.errors import ModelError
from kv8.scales.names import resolve_name

_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE_ENDINGS = ("_scale", "_scale_inv")  # both are multiplied with the weight
_ACTIVATION_ENDINGS = (".input_scale", ".input_scale_ub", ".activation_scale", ".output_scale")


def read_tensors(names: Mapping[str, Path], device: torch.device) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, as stored, on ``device``.

    Args:
        names: which file holds each tensor.
        device: where they are read to.
    """
    stored: dict[str, torch.Tensor] = {}
    for file, group in groupby(sorted(names, key=lambda name: str(names[name])), names.__getitem__):
        with safe_open(file, "pt", device=str(device)) as opened:
            stored.update((name, opened.get_tensor(name)) for name in group)
    return stored


def expand_fp8_weights(
    stored: Mapping[str, torch.Tensor],
    names: Mapping[str, Path],
    config: Mapping[str, Any],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint with FP8 weights expanded to ``dtype``.

    Args:
        stored: the checkpoint's tensors.
        names: which file holds each of them.
        config: content of config.json.
        dtype: what FP8 weights become; other tensors stay as they are.

    Raises:
        ModelError: an FP8 tensor has no scale beside it, or one of a shape that does not fit.
    """
    block = _block_size(config)
    used: set[str] = set()
    expanded = {}
    for name, tensor in stored.items():
        if tensor.dtype not in _FP8_DTYPES or resolve_name(name) is not None:
            expanded[name] = tensor
            continue
        scale_name = next((name + end for end in _SCALE_ENDINGS if name + end in stored), None)
        if scale_name is None:
            raise ModelError(
                f"Tensor {name} in {names[name].name} is stored as FP8 without a scale beside it "
                f"({name}_scale), so its values cannot be told. Use another copy of the model."
            )
        used.add(scale_name)
        scale = _broadcast(stored[scale_name].float(), tensor, block, scale_name)
        expanded[name] = (tensor.float() * scale).to(dtype)
    return {
        name: tensor
        for name, tensor in expanded.items()
        if name not in used and not _is_activation_scale(name)
    }


def _is_activation_scale(name: str) -> bool:
    return name.endswith(_ACTIVATION_ENDINGS) and resolve_name(name) is None


def _broadcast(
    scale: torch.Tensor, weight: torch.Tensor, block: tuple[int, int], name: str
) -> torch.Tensor:
    """Return ``scale`` in a shape that multiplies ``weight`` ([out, in]): one, a row or blocks."""
    if scale.numel() == 1:
        return scale.reshape(())
    if weight.dim() == 2 and scale.numel() == weight.shape[0]:
        return scale.reshape(-1, 1)
    blocks = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=False))
    if weight.dim() == 2 and tuple(scale.shape) == blocks:
        rows = scale.repeat_interleave(block[0], 0)[: weight.shape[0]]
        return rows.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    raise ModelError(
        f"Tensor {name} has shape {tuple(scale.shape)}, which fits no weight of shape "
        f"{tuple(weight.shape)}: one value, one for each output, or one for each block of {block}."
    )


def _block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    section = config.get("quantization_config") or config.get("compression_config") or {}
    size = section.get("weight_block_size")
    for group in (section.get("config_groups") or {}).values():
        size = size or ((group or {}).get("weights") or {}).get("block_structure")
    if isinstance(size, str):
        size = [int(part) for part in size.lower().split("x")]
    return (size[0], size[1]) if size else (128, 128)
