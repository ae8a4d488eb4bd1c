"""From a GGUF file's tensors to the weights of a transformers model, one tensor at a time.

Every parameter of the model must come from the file and every tensor of the file must be used:
a name that matches nothing is an error, never a random or forgotten weight.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from kv8.errors import ModelError
from kv8.models.gguf_architectures import Architecture
from kv8.models.gguf_file import GGUFFile

SHARD_BYTES = 2**30


def write_weights(
    file: GGUFFile, architecture: Architecture, config: PretrainedConfig, folder: Path
) -> None:
    """Write the weights of ``file`` to ``folder`` as safetensors, in the config's dtype.

    Unpacked in float32, undone of GGUF's rearrangements, then rounded once.

    Raises:
        ModelError: the tensors in the file are not those of the model.
    """
    shapes = _parameter_shapes(config)
    sources = _match(file, config, shapes)
    shards = _plan_shards(shapes, config.dtype.itemsize)
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        single = len(shards) == 1
        shard = "model" if single else f"model-{number:05}-of-{len(shards):05}"
        tensors = {
            name: torch.from_numpy(_restore(file.values(sources[name]), name, architecture, config))
            .to(config.dtype)
            .contiguous()
            for name in names
        }
        save_file(tensors, folder / f"{shard}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(names, f"{shard}.safetensors")
    if len(shards) > 1:
        total = sum(shape.numel() for shape in shapes.values()) * config.dtype.itemsize
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (folder / "model.safetensors.index.json").write_text(text)


def _parameter_shapes(config: PretrainedConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def _match(
    file: GGUFFile, config: PretrainedConfig, shapes: dict[str, torch.Size]
) -> dict[str, str]:
    """Return, for each parameter, the tensor of the file it comes from."""
    codes = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(codes[file.architecture], config.num_hidden_layers)
    sources: dict[str, str] = {}
    for parameter, shape in shapes.items():
        source = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        tensor = file.tensors.get(source or "")
        if tensor is None:
            raise ModelError(f"{file.path.name} lacks the tensor {source} for {parameter}.")
        if tensor.shape != tuple(shape):
            raise ModelError(
                f"{file.path.name}: tensor {source} has the shape {tensor.shape}, but its "
                f"metadata makes {parameter} {tuple(shape)}."
            )
        sources[parameter] = tensor.name
    unused = sorted(set(file.tensors) - set(sources.values()))
    if unused:
        raise ModelError(
            f"{file.path.name} holds {len(unused)} tensors that {config.architectures[0]} has no "
            f"place for: {', '.join(unused[:5])}{', ...' if len(unused) > 5 else ''}."
        )
    return sources


def _plan_shards(shapes: dict[str, torch.Size], value_bytes: int) -> list[list[str]]:
    return list(_fill_shards(shapes, value_bytes))


def _fill_shards(shapes: dict[str, torch.Size], value_bytes: int) -> Iterator[list[str]]:
    shard: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        num_bytes = shape.numel() * value_bytes
        if shard and filled + num_bytes > SHARD_BYTES:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += num_bytes
    yield shard


def _restore(
    values: NDArray[np.float32], name: str, architecture: Architecture, config: PretrainedConfig
) -> NDArray[np.float32]:
    """Undo what GGUF writers do to the weights of ``architecture``."""
    if architecture.norm_plus_one and name.endswith("norm.weight"):
        return values - np.float32(1)
    if architecture.rotary_pairs and ".self_attn.q_proj." in name:
        return _split_pairs(values, config.num_attention_heads)
    if architecture.rotary_pairs and ".self_attn.k_proj." in name:
        return _split_pairs(values, config.num_key_value_heads)
    return values


def _split_pairs(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorder rows (a0 b0 a1 b1 ...) of every head to (a0 a1 ... b0 b1 ...)."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
