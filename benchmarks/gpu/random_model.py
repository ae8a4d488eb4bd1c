"""Models with random weights, made on the device from a config: nothing is downloaded or written
but a config and a tokenizer of a few bytes.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kv8.geometry import ModelGeometry
from kv8.models.fuse_gpu import fuse_gpu_model
from kv8.models.hook import HookedModel
from kv8.models.load import hook_model

LLAMA_8B: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SMALL: Final[dict[str, Any]] = LLAMA_8B | {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 4096,
}  # fmt: skip
TINY: Final[dict[str, Any]] = SMALL | {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
}  # fmt: skip


def write_folder(folder: Path, config: dict[str, Any]) -> Path:
    """Write a model folder whose weights are a place-holder that nobody reads."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"model.norm.weight": torch.ones(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"w{n}": n for n in range(3, 16)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return folder


def make_weights(config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """Return a model of ``config`` on ``device``, with weights that keep logits far apart."""
    torch.manual_seed(seed)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(module.named_parameters()):
            if weight.dim() == 2:
                size = 0.5 if "embed" in name else 1.3 * weight.shape[1] ** -0.5
                weight.normal_(std=size, generator=generator)
    return module.requires_grad_(False).eval()


@contextmanager
def random_weights(seed: int, *, verify: bool = True) -> Iterator[None]:
    """Let engines that start inside the ``with`` block make their weights instead of reading.

    ``verify``: compare with transformers' own code at the start, as engines do.
    """

    def load(
        _source: Any,
        config: Any,
        geometry: ModelGeometry,
        dtype: str,
        *,
        device: torch.device,
        fuse: bool = False,
    ) -> HookedModel:
        module = make_weights(config, getattr(torch, dtype), device, seed)
        if device.type != "cpu":
            return hook_model(module, geometry, verify=verify, fuse=fuse)
        model = hook_model(module, geometry, verify=False)  # a dry run, which takes a GPU's way
        if fuse:
            fuse_gpu_model(model)
        return model

    with mock.patch("kv8.engine.engine.load_model", load):
        yield
