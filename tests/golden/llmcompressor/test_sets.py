"""The scales a real llm-compressor wrote load with exactly those numbers; see ../README.md."""

import json
import re
from pathlib import Path

import pytest
import torch
from tests.checkpoint_folders import GEMMA3, GOLDEN, SMOLLM2, golden_folder, golden_tensors

from kv8.errors import ScaleError
from kv8.formats.base import FP8_E4M3
from kv8.layer_plan import make_layer_plan, resolve_cache_format
from kv8.scales.checkpoint import CheckpointScales, read_checkpoint
from kv8.scales.resolve import ResolvedScales, resolve_scales
from kv8.scales.scale import OriginKind

SETS = sorted(folder.name for folder in GOLDEN.iterdir() if (folder / "config.json").is_file())
GARBAGE = [name for name in SETS if name.endswith("llmc0.14.0.1")]


def geometry(name: str):
    return GEMMA3 if name.startswith("gemma3") else SMOLLM2


def resolve(name: str, checkpoint: CheckpointScales, **options: str) -> ResolvedScales:
    chosen, _ = resolve_cache_format("auto", checkpoint.declaration, "bfloat16")
    assert chosen is FP8_E4M3
    plan = make_layer_plan(geometry(name), chosen, ())
    return resolve_scales(geometry(name), plan, checkpoint, None, **options)  # type: ignore[arg-type]


def test_there_are_fourteen_sets() -> None:
    assert len(SETS) == 14
    assert len(GARBAGE) == 2


@pytest.mark.parametrize("name", SETS)
def test_every_number_arrives_with_its_tensors_name(tmp_path: Path, name: str) -> None:
    """Pitfalls 1, 73: every scale tensor of the file is bound, per head where it is per head."""
    checkpoint = read_checkpoint(golden_folder(tmp_path, name), geometry(name))
    resolved = resolve(name, checkpoint)
    stored = golden_tensors(name)
    assert checkpoint.tensors == set(stored)
    for number, scales in resolved.scales:
        for side in ("k", "v") if name in GARBAGE else ("q", "k", "v"):
            tensor = f"model.layers.{number}.self_attn.{side}_scale"
            scale = scales.side(side)  # type: ignore[arg-type]
            if tensor not in stored:
                assert scale is None
                continue
            assert scale is not None
            assert scale.values == tuple(stored[tensor].to(torch.float32).flatten().tolist())
            assert scale.origin.kind is OriginKind.CHECKPOINT
            assert scale.origin.detail == f"{tensor} in model.safetensors"
    assert len(resolved.scales.layers) == len(geometry(name).layers)
    assert resolved.uncalibrated_layers == ()


@pytest.mark.parametrize("name", SETS)
def test_the_declaration_is_understood(tmp_path: Path, name: str) -> None:
    checkpoint = read_checkpoint(golden_folder(tmp_path, name), geometry(name))
    declaration = checkpoint.declaration
    assert declaration is not None
    assert declaration.producer == "compressed-tensors"
    assert declaration.strategy == ("attn_head" if "attn_head" in name else "tensor")
    assert declaration.queries is name.startswith("kvattn")


@pytest.mark.parametrize("name", [name for name in SETS if name not in GARBAGE])
def test_queries_are_quantized_when_their_scales_are_there(tmp_path: Path, name: str) -> None:
    checkpoint = read_checkpoint(golden_folder(tmp_path, name), geometry(name))
    resolved = resolve(name, checkpoint)
    assert resolved.fp8_queries is name.startswith("kvattn")
    assert resolved.warnings == ()


@pytest.mark.parametrize("name", GARBAGE)
def test_uninitialised_q_scales_give_native_queries_and_one_warning(
    tmp_path: Path, name: str
) -> None:
    checkpoint = read_checkpoint(golden_folder(tmp_path, name), SMOLLM2)
    resolved = resolve(name, checkpoint)
    assert not resolved.fp8_queries
    assert all(scales.q is None for _, scales in resolved.scales)
    (warning,) = resolved.warnings
    assert "layers 0" in warning
    assert "llm-compressor 0.14.0 and 0.14.0.1" in warning
    assert resolve(name, checkpoint, query_dtype="native").warnings == ()
    with pytest.raises(ScaleError, match=r"Unusable q scales in layers 0.*query_dtype=fp8"):
        resolve(name, checkpoint, query_dtype="fp8")


@pytest.mark.parametrize("name", SETS)
def test_half_the_layers_without_scales_do_not_start(tmp_path: Path, name: str) -> None:
    """Pitfall 2: with every second layer's scales gone, the start is refused naming the layers."""
    stored = golden_tensors(name)
    odd = re.compile(r"model\.layers\.\d*[13579]\.")
    kept = {tensor: value for tensor, value in stored.items() if not odd.match(tensor)}
    checkpoint = read_checkpoint(golden_folder(tmp_path, name, kept), geometry(name))
    lost = ", ".join(str(n) for n in range(1, len(geometry(name).layers), 2))
    with pytest.raises(ScaleError, match=rf"no k or v scale in layers {lost}\."):
        resolve(name, checkpoint)
    resolved = resolve(name, checkpoint, missing_scales="default")
    assert resolved.uncalibrated_layers == tuple(range(1, len(geometry(name).layers), 2))


def test_sets_of_one_run_differ_where_they_should(tmp_path: Path) -> None:
    prints = {
        name: resolve(
            name, read_checkpoint(golden_folder(tmp_path / name, name), SMOLLM2)
        ).scales.fingerprint()
        for name in ("kv-only-tensor", "kv-only-attn_head", "kvattn-tensor", "kvattn-attn_head")
    }
    assert len(set(prints.values())) == 4


def test_the_index_of_this_folder_is_complete() -> None:
    text = (GOLDEN.parent / "README.md").read_text()
    for name in SETS:
        assert f"`{name}`" in text
    json.loads((GOLDEN / "vllm_loader_cases.json").read_text())
