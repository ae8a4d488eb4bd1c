"""SmolLM2 with the scales llm-compressor measured for it: shown, used, and missed when lost."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.checkpoint_folders import GOLDEN, golden_tensors
from tests.command_line import kv8

from kv8 import LLM, SamplingParams
from kv8.formats.base import FP8_E4M3
from kv8.formats.encode import bits, encode
from kv8.models.source import resolve_source

pytestmark = pytest.mark.model

PROMPT = "London is the capital of"
MEMORY = "16MiB"


def checkpoint(folder: Path, name: str, tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    """Write a folder as llm-compressor would: its config and scales beside the model's weights."""
    model = resolve_source("smollm2").folder
    folder.mkdir()
    for file in model.iterdir():
        target = "weights.safetensors" if file.suffix == ".safetensors" else file.name
        if file.name != "config.json":
            (folder / target).symlink_to(file)
    (folder / "config.json").write_bytes((GOLDEN / name / "config.json").read_bytes())
    scales = dict(golden_tensors(name) if tensors is None else tensors)
    save_file(scales, folder / "scales.safetensors")
    with safe_open(folder / "weights.safetensors", "pt") as weights:
        weight_map = dict.fromkeys(weights.keys(), "weights.safetensors")
    weight_map |= dict.fromkeys(scales, "scales.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def stored(model: str | Path, **options: object) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return the codes of the prompt's keys and values, [K, T, D] each, by layer."""
    with LLM(model, kv_cache_memory=MEMORY, **options) as llm:
        engine = llm.engine
        ids = llm.get_tokenizer().encode(PROMPT)
        engine.add_request("0", ids, SamplingParams(temperature=0, max_tokens=2))
        engine.step()
        [block] = engine.cache.block_table(0, 0)
        codes = {n: engine.runner.pool.codes(n) for n in engine.runner.layers}
        return {
            n: (k[block, :, : len(ids)], v[block, :, : len(ids)]) for n, (k, v) in codes.items()
        }


@pytest.fixture(scope="module")
def unquantized() -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return stored("smollm2", kv_cache_dtype="bfloat16")


@pytest.fixture(scope="module")
def uncalibrated() -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return stored("smollm2", kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    "name", ["kvattn-tensor", "kvattn-attn_head", "kv-only-tensor", "kv-only-attn_head"]
)
def test_the_scales_are_shown_and_used(name, tmp_path, unquantized, uncalibrated) -> None:
    """Pitfalls 1, 7, 73: what `inspect` shows is in the file, and what is stored follows it."""
    folder, tensors = checkpoint(tmp_path / name, name), golden_tensors(name)
    layers = kv8("inspect", folder, "--json").json["layers"]
    assert len(layers) == 30
    for layer in layers:
        for side in "qkv" if name.startswith("kvattn") else "kv":
            tensor = f"model.layers.{layer['layer']}.self_attn.{side}_scale"
            shown = layer[side]["scale"]
            values = shown if isinstance(shown, list) else [shown]
            assert values == tensors[tensor].float().flatten().tolist()
            assert layer[side]["origin"] == f"checkpoint: {tensor} in scales.safetensors"

    codes = stored(folder)
    for number in range(30):
        for mine, plain in zip(codes[number], uncalibrated[number], strict=True):
            assert mine.dtype is plain.dtype is torch.float8_e4m3fn
            assert not torch.equal(bits(mine), bits(plain))
    # No attention lies before the first layer's keys and values, so they are the same in every
    # cache, and their codes can be foretold bit by bit.
    for side, mine, exact in zip("kv", codes[0], unquantized[0], strict=True):
        scale = tensors[f"model.layers.0.self_attn.{side}_scale"].float().reshape(-1, 1, 1)
        assert torch.equal(bits(mine), bits(encode(exact, scale, FP8_E4M3)))


def test_lost_scales_are_refused_by_layer(tmp_path) -> None:
    """Pitfall 2: every second layer's scales are gone, and the start names these layers."""
    name = "kv-only-tensor"
    kept = {t: v for t, v in golden_tensors(name).items() if int(t.split(".")[2]) % 2 == 0}
    result = kv8("generate", checkpoint(tmp_path / name, name, kept), PROMPT)
    assert result.code == 2
    assert f"no k or v scale in layers {', '.join(map(str, range(1, 30, 2)))}." in result.err


@pytest.mark.parametrize("name", ["kvattn-tensor-llmc0.14.0.1", "kvattn-attn_head-llmc0.14.0.1"])
def test_uninitialised_q_scales_serve_with_native_queries(name, tmp_path) -> None:
    folder = checkpoint(tmp_path / name, name)
    words = (folder, PROMPT, "--temperature", "0", "--max-tokens", "3", "--kv-cache-memory", MEMORY)
    result = kv8("generate", *words, "--json")
    assert result.code == 0, result.err
    # Kingdom and States tie to the last bit of bfloat16 logits with these k and v scales.
    assert result.json["text"].startswith(" the United")
    if "tensor" in name:
        native = kv8("generate", *words, "--query-dtype", "native", "--json")
        assert result.json["text"] == native.json["text"]
    [warning] = [line for line in result.err.splitlines() if "warning" in line.lower()]
    assert "the q scales of layers 0-29 are unusable" in warning
    assert "llm-compressor 0.14.0 and 0.14.0.1" in warning
    refused = kv8("generate", *words, "--query-dtype", "fp8")
    assert refused.code == 2
    assert "Unusable q scales in layers 0-29" in refused.err
