"""From a GGUF file's tensors to the weights of a transformers model, a few megabytes at a time.

Every parameter of the model must come from the file and every tensor of the file must be used:
a name that matches nothing is an error, never a random or forgotten weight.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from kv8.errors import ModelError
from kv8.models.gguf_architectures import Architecture
from kv8.models.gguf_file import GGUFFile

SHARD_BYTES = 2**30
# Read into the config, and no parameters in transformers.
_NOT_WEIGHTS = frozenset({"rope_freqs.weight"})
# transformers keeps these two of a GGUF file as one, gate before up.
_FUSED_EXPERTS = re.compile(r"model\.layers\.(\d+)\..*experts\.gate_up_proj")


def parameter_shapes(config: PretrainedConfig) -> dict[str, torch.Size]:
    """Return the shape of every weight a checkpoint of ``config`` holds; allocates nothing."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def write_weights(
    file: GGUFFile,
    architecture: Architecture,
    config: PretrainedConfig,
    shapes: Mapping[str, torch.Size],
    folder: Path,
) -> None:
    """Write the weights of ``file`` to ``folder`` as safetensors, in the config's dtype.

    Unpacked in float32, undone of GGUF's rearrangements, then rounded once.

    Args:
        file: the source.
        architecture: how it rearranges weights.
        config: of the model.
        shapes: those of `parameter_shapes`.
        folder: where to write.

    Raises:
        ModelError: the tensors in the file are not those of the model.
    """
    sources = _match(file, config, shapes)
    shards = list(_plan_shards(shapes, config.dtype.itemsize))
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        single = len(shards) == 1
        shard = "model" if single else f"model-{number:05}-of-{len(shards):05}"
        tensors = {name: _read(file, sources[name], name, architecture, config) for name in names}
        save_file(tensors, folder / f"{shard}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(names, f"{shard}.safetensors")
    if len(shards) > 1:
        total = sum(shape.numel() for shape in shapes.values()) * config.dtype.itemsize
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (folder / "model.safetensors.index.json").write_text(text)


def _match(
    file: GGUFFile, config: PretrainedConfig, shapes: Mapping[str, torch.Size]
) -> dict[str, list[str]]:
    """Return, for each parameter, the tensors of the file it is made of, in order of rows."""
    codes = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(codes[file.architecture], config.num_hidden_layers)
    sources: dict[str, list[str]] = {}
    for parameter, shape in shapes.items():
        if fused := _FUSED_EXPERTS.fullmatch(parameter):
            layer = fused.group(1)
            wanted = [f"blk.{layer}.ffn_gate_exps.weight", f"blk.{layer}.ffn_up_exps.weight"]
        else:
            source = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
            # The name of a bare parameter, such as all experts of a layer, lacks the suffix.
            wanted = [source if source in file.tensors else f"{source}.weight"]
        for source in wanted:
            if source not in file.tensors:
                raise ModelError(f"{file.path.name} lacks the tensor {source} for {parameter}.")
        _check_shape(file, wanted, parameter, tuple(shape))
        sources[parameter] = wanted
    used = {source for wanted in sources.values() for source in wanted} | _NOT_WEIGHTS
    if unused := sorted(set(file.tensors) - used):
        raise ModelError(
            f"{file.path.name} holds {len(unused)} tensors that {config.architectures[0]} has no "
            f"place for: {', '.join(unused[:5])}{', ...' if len(unused) > 5 else ''}."
        )
    return sources


def _check_shape(
    file: GGUFFile, sources: list[str], parameter: str, shape: tuple[int, ...]
) -> None:
    found = [file.tensors[source].shape for source in sources]
    # Fused experts [experts, rows, columns] are joined along their rows.
    joined = found[0] if len(found) == 1 else (found[0][0], 2 * found[0][1], *found[0][2:])
    if joined != shape or any(other != found[0] for other in found):
        raise ModelError(
            f"{file.path.name}: {' and '.join(sources)} of shape {found[0]} cannot become "
            f"{parameter} {shape}, the shape its metadata gives."
        )


def _plan_shards(shapes: Mapping[str, torch.Size], value_bytes: int) -> Iterator[list[str]]:
    """Yield the names of each file's tensors: in order, up to `SHARD_BYTES` or one tensor."""
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


def _read(
    file: GGUFFile,
    sources: list[str],
    name: str,
    architecture: Architecture,
    config: PretrainedConfig,
) -> Tensor:
    """Return the weight ``name``, undone of what GGUF writers do to it."""
    added = 1.0 if architecture.norm_plus_one and name.endswith("norm.weight") else 0.0
    parts = [_unpack(file, source, added, config.dtype) for source in sources]
    weight = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if architecture.rotary_pairs and ".self_attn.q_proj." in name:
        return _split_pairs(weight, config.num_attention_heads)
    if architecture.rotary_pairs and ".self_attn.k_proj." in name:
        return _split_pairs(weight, config.num_key_value_heads)
    return weight


def _unpack(file: GGUFFile, source: str, added: float, dtype: torch.dtype) -> Tensor:
    """Return tensor ``source`` less ``added``, rounded to ``dtype``."""
    weight = torch.empty(file.tensors[source].shape, dtype=dtype)
    flat = weight.view(-1)
    start = 0
    for values in file.pieces(source):
        flat[start : start + values.size] = torch.from_numpy(values - added if added else values)
        start += values.size
    return weight


def _split_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder rows (a0 b0 a1 b1 ...) of every head to (a0 a1 ... b0 b1 ...).

    Args:
        rows: [num_heads * D, ...], weights or biases.
        num_heads: how many heads of D rows.
    """
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()
