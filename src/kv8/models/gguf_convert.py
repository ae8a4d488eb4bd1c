"""Convert a GGUF file to a Hugging Face folder: config, weights, tokenizer, end tokens."""

import json
import math
from pathlib import Path

import torch
from gguf import GGMLQuantizationType
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kv8.errors import ModelError
from kv8.models.conversion_cache import require_space
from kv8.models.gguf_architectures import read_config
from kv8.models.gguf_file import GGUFFile, open_gguf
from kv8.models.gguf_tokenizer import end_tokens, write_tokenizer
from kv8.models.gguf_weights import parameter_shapes, write_weights

_TOKENIZER_BYTES = 40 * 2**20  # of a large one


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model in the GGUF file ``path`` to the existing empty ``folder``.

    Weights are unpacked in float32, then rounded once to the model's dtype: float32 if the file
    holds nothing narrower, bfloat16 otherwise. Float16 files become bfloat16 as well: they nearly
    always come from bfloat16 weights, and activations in float16 overflow in many models.

    Raises:
        ModelError: the file is damaged, incomplete, or of a kind that cannot be converted.
    """
    with open_gguf(path) as file:
        architecture, entries = read_config(file)
        model_type = architecture.model_type
        entries["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
        entries["dtype"] = _dtype(file)
        try:
            config = AutoConfig.for_model(model_type, **entries)
            shapes = parameter_shapes(config)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
            raise ModelError(
                f"{path.name}: its metadata makes no valid {model_type} model: {reason}"
            ) from error
        require_space(folder, _converted_bytes(file, config.dtype))
        config.save_pretrained(folder)
        write_tokenizer(file, folder)
        _write_generation_config(file, config, folder)
        write_weights(file, architecture, config, shapes, folder)


def _converted_bytes(file: GGUFFile, dtype: torch.dtype) -> int:
    num_values = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    return num_values * dtype.itemsize + _TOKENIZER_BYTES


def _dtype(file: GGUFFile) -> torch.dtype:
    matrices = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return torch.float32 if matrices == {GGMLQuantizationType.F32} else torch.bfloat16


def _write_generation_config(file: GGUFFile, config: PretrainedConfig, folder: Path) -> None:
    ends = end_tokens(file)
    entries = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": config.pad_token_id,
    }
    present = {name: value for name, value in entries.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(present, indent=2) + "\n")
