"""Weights and caches of other types than the model's: what is said of them, and what comes out."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engines import start_engine, teacher_forced
from tests.tiny_models import prompt_ids

IDS = prompt_ids(40, seed=6)


@pytest.fixture(scope="module")
def fp8_weights(tiny_model, tmp_path_factory):
    """Return a model whose linear layers are stored as FP8, with nothing about its KV cache."""
    folder = tmp_path_factory.mktemp("fp8") / "model"
    shutil.copytree(tiny_model("llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_fp8_weights_without_cache_scales_serve_an_fp8_cache_at_1(fp8_weights, caplog) -> None:
    """Pitfall 10: the cache is uncalibrated and says so; nothing complains of something else."""
    engine = start_engine(fp8_weights, kv_cache_dtype="fp8")
    for _, scales in engine.runner.scales:
        assert scales.q is None
        assert [str(scale.origin) for scale in (scales.k, scales.v)] == ["default: 1.0"] * 2
    [warning] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "no k or v scale in layers 0-3" in warning


def test_fp8_weights_say_nothing_of_a_16_bit_cache(fp8_weights, caplog) -> None:
    """Pitfall 12: the weights' scales are no business of the cache."""
    engine = start_engine(fp8_weights)
    assert engine.config.kv_format.name == "float32"
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(("dtype", "other"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_a_16_bit_cache_of_the_other_type_converts(dtype, other, tiny_model) -> None:
    """Pitfall 32: what is stored as another 16-bit type is the same number, not the same bits."""
    folder = tiny_model("llama")
    own = teacher_forced(start_engine(folder, dtype=dtype), IDS, chunks=[20, 1])
    cache = start_engine(folder, dtype=dtype, kv_cache_dtype=other)
    assert {str(layer.k_codes.dtype) for layer in cache.runner.layers.values()} == {
        f"torch.{other}"
    }
    exact = teacher_forced(start_engine(folder, dtype="float32"), IDS, chunks=[20, 1])
    difference = (teacher_forced(cache, IDS, chunks=[20, 1]) - own).abs().mean()
    # bfloat16 rounds the cache no more coarsely than a bfloat16 model rounds everything else.
    rounded = teacher_forced(start_engine(folder, dtype="bfloat16"), IDS, chunks=[20, 1])
    assert difference < (rounded - exact).abs().mean()
