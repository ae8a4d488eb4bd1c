"""Geometries and checkpoint folders for tests of scales: config.json and scales, no weights."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kv8.geometry import LayerGeometry, ModelGeometry

GOLDEN = Path(__file__).parent / "golden" / "llmcompressor"
SCHEME = {
    "type": "float",
    "num_bits": 8,
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
ATTENTION_GROUP = {
    "targets": ["LlamaAttention"],
    "input_activations": SCHEME,
    "weights": None,
    "output_activations": None,
}


def geometry_of(
    num_layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    *,
    types: Sequence[str] | None = None,
    sources: Mapping[int, int] | None = None,
    without_attention: Sequence[int] = (),
    model_dtype: str = "bfloat16",
) -> ModelGeometry:
    """Return a geometry; ``sources`` maps layers of shared KV to the layer they read."""
    names = types or ["full_attention"] * num_layers
    layers = tuple(
        LayerGeometry(
            layer=number,
            type=names[number],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=16,
            window=512 if names[number] == "sliding_attention" else None,
            kv_source=(sources or {}).get(number, number),
        )
        for number in range(num_layers)
        if number not in without_attention
    )
    return ModelGeometry("TinyForCausalLM", model_dtype, 2048, 100, layers)


SMOLLM2 = geometry_of(30, 9, 3)
GEMMA3 = geometry_of(
    18,
    4,
    1,
    types=["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(18)],
)


def compressed_tensors(scheme: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a KV-only compressed-tensors section; ``changes`` alter single scheme fields."""
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {**(SCHEME if scheme is None else scheme), **changes},
    }


def write_folder(
    folder: Path,
    tensors: Mapping[str, torch.Tensor | float] | None = None,
    quantization: Any = None,
    **config: Any,
) -> Path:
    """Write config.json and, if there are tensors, model.safetensors into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        as_tensors = {
            name: value if isinstance(value, torch.Tensor) else torch.tensor([value])
            for name, value in tensors.items()
        }
        save_file(as_tensors, folder / "model.safetensors")
    return folder


def scale_tensors(num_layers: int = 4, k: float = 0.05, v: float = 0.08) -> dict[str, float]:
    """Return k and v scales of every layer, named as llm-compressor names them."""
    prefix = "model.layers"
    return {
        f"{prefix}.{layer}.self_attn.{side}_scale": value
        for layer in range(num_layers)
        for side, value in (("k", k), ("v", v))
    }


def golden_tensors(name: str) -> dict[str, torch.Tensor]:
    """Return the scale tensors of one golden set."""
    return load_file(GOLDEN / name / "scales.safetensors")


def golden_folder(
    folder: Path, name: str, tensors: Mapping[str, torch.Tensor] | None = None
) -> Path:
    """Write the checkpoint of one golden set (with other ``tensors``, if given) to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes((GOLDEN / name / "config.json").read_bytes())
    save_file(
        dict(golden_tensors(name) if tensors is None else tensors), folder / "model.safetensors"
    )
    return folder
