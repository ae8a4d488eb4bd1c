"""Calibrate, write, serve: the layer table shows exactly the written numbers and their origin."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.command_line import kv8
from tests.tiny_gguf import VOCAB as GGUF_VOCAB
from tests.tiny_gguf import write_gguf
from tests.tiny_models import make_config, make_model, prompt_ids, save_model
from tests.unit.calibration.test_outputs import fp8_weights
from tests.written_scales import geometry_in, made_up_scales, metadata_for, write

from kv8 import LLM, SamplingParams, calibrate
from kv8.errors import ScaleError
from kv8.formats.base import FP8_E5M2
from kv8.scales.scale import SIDES, ModelScales

MEMORY = "2MiB"
PROMPT = prompt_ids(40)
SMALL: dict[str, Any] = {"samples": 4, "max_length": 32, "use_tqdm": False}


def served(model: Path, **options: Any) -> tuple[dict[tuple[int, str], Any], list[int]]:
    """Return the layer table's scales by layer and side, and the tokens the model goes on with."""
    with LLM(model, kv_cache_memory=MEMORY, **options) as llm:
        [output] = llm.generate(
            [PROMPT], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
        )
        table = {
            (layer.layer, side): layer.scale(side)
            for layer in llm.kv_cache_report().layers
            for side in SIDES
            if layer.scale(side) is not None
        }
    return table, output.outputs[0].token_ids


def numbers(scales: ModelScales) -> dict[tuple[int, str], tuple[float, ...]]:
    return {
        (number, side): scale.values
        for number, layer in scales
        for side in SIDES
        if (scale := layer.side(side)) is not None
    }


@pytest.mark.parametrize(
    ("family", "strategy", "queries"),
    [
        ("llama", "tensor", False),
        ("gemma3", "attn_head", True),
        ("gemma3n", "attn_head", False),
        ("gemma4", "tensor", True),
    ],
)
def test_what_calibration_found_is_what_both_outputs_serve_with(
    tiny_model, tmp_path: Path, family: str, strategy: str, queries: bool
) -> None:
    """Pitfall 1: the numbers measured, written, read and used are the same."""
    model, out = tiny_model(family), tmp_path / "out"
    made = calibrate(
        model,
        "random",
        output=out,
        checkpoint=True,
        strategy=strategy,
        query_scales=queries,
        **SMALL,
    )
    num_tokens = 3 * 32  # the fourth sample is held out
    wanted = numbers(made.scales)
    assert {side for _, side in wanted} == set("qkv" if queries else "kv")
    from_checkpoint, tokens = served(out)
    file = out / "kv_scales.safetensors"
    from_file, same_tokens = served(model, kv_cache_dtype="fp8", kv_scales=file)
    assert tokens == same_tokens
    for layer in geometry_in(model).layers:
        for side in ("k", "v"):
            wanted[layer.layer, side] = wanted[layer.kv_source, side]  # shared with its cache
    for table in (from_checkpoint, from_file):
        assert {key: scale.values for key, scale in table.items()} == wanted
    for (layer, side), scale in from_file.items():
        origin = str(scale.origin)
        there = str(from_checkpoint[layer, side].origin)
        if geometry_in(model).layer(layer).owns_kv:
            assert origin.startswith(f"calibration, {num_tokens} ")
            assert f"tokens, absmax (layers.{layer}.{side}_scale in kv_scales" in origin
            assert there.startswith(f"checkpoint: model.layers.{layer}.self_attn.{side}_scale in ")
            assert f"(calibration, {num_tokens} " in there


def test_the_checkpoint_decides_for_an_fp8_cache(tiny_model, tmp_path: Path) -> None:
    write(tiny_model(), tmp_path / "out", sides="qkv")
    result = kv8("inspect", tmp_path / "out", "--json")
    assert result.code == 0, result.err
    assert {layer["dtype"] for layer in result.json["layers"]} == {"fp8_e4m3"}
    assert result.json["calibrated"] is True
    plain = kv8("inspect", tmp_path / "out", "--kv-cache-dtype", "float32", "--json")
    assert {layer["dtype"] for layer in plain.json["layers"]} == {"float32"}


def test_a_model_with_fp8_weights_is_served_with_its_new_scales(tiny_model, tmp_path: Path) -> None:
    model = fp8_weights(tiny_model(), tmp_path / "model")
    scales = write(model, tmp_path / "out", strategy="attn_head")
    table, tokens = served(tmp_path / "out")
    assert {key: scale.values for key, scale in table.items()} == numbers(scales)
    file = tmp_path / "out" / "kv_scales.safetensors"
    assert served(model, kv_cache_dtype="fp8", kv_scales=file)[1] == tokens


def test_a_gguf_model_makes_a_checkpoint_of_its_converted_folder(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KV8_CACHE", str(tmp_path / "cache"))
    model = make_model(make_config(vocab_size=GGUF_VOCAB))
    file = write_gguf(tmp_path / "tiny.gguf", model, "llama")
    made = calibrate(file, "random", output=tmp_path / "out", checkpoint=True, **SMALL)
    table, tokens = served(tmp_path / "out")
    assert {key: scale.values for key, scale in table.items()} == numbers(made.scales)
    scales_file = tmp_path / "out" / "kv_scales.safetensors"
    assert served(file, kv_cache_dtype="fp8", kv_scales=scales_file)[1] == tokens
    assert not (tmp_path / "out" / "kv8_source.json").exists()


def test_scales_of_other_weights_are_used_with_a_warning(
    tiny_model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same geometry with other weights: the numbers fit, but were measured elsewhere."""
    model, other = tiny_model(), save_model(tmp_path / "other", seed=5)
    write(model, tmp_path / "out", checkpoint=False)
    file = tmp_path / "out" / "kv_scales.safetensors"
    for folder, warnings in ((model, 0), (other, 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kv8"):
            served(folder, kv_cache_dtype="fp8", kv_scales=file)
        found = [r for r in caplog.records if "measured with other weights" in r.getMessage()]
        assert len(found) == warnings


def test_scales_made_for_e5m2_serve_e5m2_only(tiny_model, tmp_path: Path) -> None:
    model = tiny_model()
    metadata = metadata_for(model, kv_cache_dtype=FP8_E5M2.name)
    write(model, tmp_path / "out", metadata=metadata, checkpoint=False)
    file = tmp_path / "out" / "kv_scales.safetensors"
    with pytest.raises(ScaleError, match="made for fp8_e5m2"):
        served(model, kv_cache_dtype="fp8", kv_scales=file)
    table, _ = served(model, kv_cache_dtype="fp8_e5m2", kv_scales=file)
    assert {key: s.values for key, s in table.items()} == numbers(
        made_up_scales(geometry_in(model))
    )


@pytest.mark.model
def test_a_checkpoint_of_smollm2(tmp_path: Path) -> None:
    made = calibrate("smollm2", "random", output=tmp_path / "out", checkpoint=True, **SMALL)
    shard = tmp_path / "out" / "model-00002-of-00002.safetensors"
    stored = load_file(shard)
    assert len(stored) == 60
    for (layer, side), values in numbers(made.scales).items():
        tensor = stored[f"model.layers.{layer}.self_attn.{side}_scale"]
        assert tensor.dtype == torch.float32
        assert tuple(tensor.tolist()) == values
    result = kv8("generate", tmp_path / "out", "London is", "--max-tokens", "2", "--json")
    assert result.code == 0, result.err
    assert result.json["kv_cache"]["dtypes"] == {"fp8_e4m3": 30}
    assert result.json["kv_cache"]["calibrated"] is True
