"""Scales out of a checkpoint folder: binding, shapes, values, broken files."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint_folders import compressed_tensors, geometry_of, scale_tensors, write_folder

from kv8.errors import ModelError, ScaleError
from kv8.scales.checkpoint import read_checkpoint
from kv8.scales.provenance import ScalesFileMetadata
from kv8.scales.scale import Origin, OriginKind

P = "model.layers.{}.self_attn."


def test_each_scale_is_bound_with_its_tensor_and_file(tmp_path: Path) -> None:
    """Pitfall 1: effective scales equal those in the file, and no scale tensor is left over."""
    tensors = {**scale_tensors(), "model.layers.0.self_attn.k_proj.weight": torch.zeros(4, 4)}
    found = read_checkpoint(write_folder(tmp_path, tensors, compressed_tensors()), geometry_of())
    assert [number for number, _ in found.scales] == [0, 1, 2, 3]
    for number, scales in found.scales:
        assert scales.k is not None
        assert scales.v is not None
        assert scales.k.values == (pytest.approx(0.05),)
        assert scales.v.values == (pytest.approx(0.08),)
        detail = f"model.layers.{number}.self_attn.k_scale in model.safetensors"
        assert scales.k.origin == Origin(OriginKind.CHECKPOINT, detail)
    assert found.tensors == set(scale_tensors())
    assert found.scales.problems == ()


def test_scales_without_a_declaration_are_there_but_not_declared(tmp_path: Path) -> None:
    found = read_checkpoint(write_folder(tmp_path, scale_tensors()), geometry_of())
    assert found.declaration is None
    assert len(found.scales.layers) == 4


def test_a_folder_without_scales_or_weights_has_none(tmp_path: Path) -> None:
    found = read_checkpoint(write_folder(tmp_path), geometry_of())
    assert found.scales.layers == {}
    assert found.declaration is None


def test_one_kv_scale_counts_for_both(tmp_path: Path) -> None:
    """Pitfall 9: a lone kv_scale is K's and V's."""
    found = read_checkpoint(write_folder(tmp_path, {P.format(1) + "kv_scale": 0.25}), geometry_of())
    scales = found.scales.layer(1)
    assert scales.k == scales.v
    assert scales.k is not None
    assert scales.k.values == (0.25,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype_is_read_as_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = torch.tensor([0.03], dtype=dtype)
    found = read_checkpoint(
        write_folder(tmp_path, {P.format(0) + "k_scale": stored}), geometry_of()
    )
    scale = found.scales.layer(0).k
    assert scale is not None
    assert scale.values == (stored.to(torch.float32).item(),)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.bool])
def test_other_dtypes_are_no_scales(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = torch.tensor([1.0]).to(dtype)
    found = read_checkpoint(
        write_folder(tmp_path, {P.format(0) + "k_scale": stored}), geometry_of()
    )
    assert "dtype" in found.scales.problems[0].text


@pytest.mark.parametrize(
    "value", [0.0, -0.05, math.nan, math.inf, 1e-40, 1e-30, 1e30], ids=lambda v: f"{v:g}"
)
@pytest.mark.parametrize("side", ["q", "k", "v"])
def test_a_bad_value_is_a_problem_that_names_layer_tensor_and_value(
    tmp_path: Path, value: float, side: str
) -> None:
    tensors = {**scale_tensors(), f"{P.format(2)}{side}_scale": value}
    found = read_checkpoint(write_folder(tmp_path, tensors), geometry_of())
    (problem,) = found.scales.problems
    assert (problem.layer, problem.side) == (2, side)
    assert f"model.layers.2.self_attn.{side}_scale in model.safetensors" in problem.text
    assert repr(torch.tensor(value).item()) in problem.text
    assert found.scales.layer(2).side(side) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "shape", "good"),
    [
        ("tensor", (), True),
        ("tensor", (1,), True),
        ("tensor", (2, 1, 1), False),
        ("attn_head", (2, 1, 1), True),
        ("attn_head", (2,), True),
        ("attn_head", (1,), False),
        ("attn_head", (4,), False),
        (None, (1,), True),
        (None, (2, 1, 1), True),
        (None, (3,), False),
    ],
)
def test_the_declared_strategy_decides_the_shape(
    tmp_path: Path, strategy: str | None, shape: tuple[int, ...], good: bool
) -> None:
    quantization = compressed_tensors(strategy=strategy) if strategy else None
    tensors = {P.format(0) + "k_scale": torch.full(shape, 0.5)}
    found = read_checkpoint(write_folder(tmp_path, tensors, quantization), geometry_of())
    assert (found.scales.problems == ()) is good
    if not good:
        assert str(list(shape)) in found.scales.problems[0].text


def test_a_weight_sized_tensor_with_a_scales_name_is_judged_unread(tmp_path: Path) -> None:
    tensors = {P.format(0) + "k_scale": torch.ones(512, 512)}
    found = read_checkpoint(write_folder(tmp_path, tensors), geometry_of())
    assert "[512, 512]" in found.scales.problems[0].text


def test_an_unknown_layer_is_refused_by_name(tmp_path: Path) -> None:
    """Pitfall 7: an entry for layer 99 fails."""
    folder = write_folder(tmp_path, {**scale_tensors(), P.format(99) + "k_scale": 0.1})
    with pytest.raises(ScaleError, match=r"model\.layers\.99\.self_attn\.k_scale.*layers 0-3"):
        read_checkpoint(folder, geometry_of())


def test_a_layer_without_attention_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {P.format(2) + "v_scale": 0.1})
    with pytest.raises(ScaleError, match=r"model\.layers\.2.*layers 0, 1, 3"):
        read_checkpoint(folder, geometry_of(without_attention=[2]))


def test_a_layer_that_reads_anothers_kv_has_no_k_scale_but_a_q_scale(tmp_path: Path) -> None:
    geometry = geometry_of(sources={3: 1})
    good = {P.format(1) + "k_scale": 0.1, P.format(3) + "q_scale": 0.2}
    found = read_checkpoint(write_folder(tmp_path / "good", good), geometry)
    assert found.scales.layer(3).q is not None
    folder = write_folder(tmp_path / "bad", {P.format(3) + "k_scale": 0.1})
    with pytest.raises(ScaleError, match=r"layers\.3\..*layer 1"):
        read_checkpoint(folder, geometry)


def test_a_copy_for_a_layer_that_reads_anothers_kv_is_accepted(tmp_path: Path) -> None:
    """Pitfall 1: vLLM gives every layer scales of its own, so checkpoints repeat the source's."""
    geometry = geometry_of(sources={3: 1})
    tensors = {P.format(n) + f"{s}_scale": 0.1 for n in (1, 3) for s in "kv"}
    found = read_checkpoint(write_folder(tmp_path / "good", tensors), geometry)
    assert list(found.scales.layers) == [1]
    assert found.tensors == set(tensors)
    other = tensors | {P.format(3) + "v_scale": 0.2}
    with pytest.raises(ScaleError, match=r"layers\.3\.self_attn\.v_scale .* would be lost"):
        read_checkpoint(write_folder(tmp_path / "bad", other), geometry)


def test_scales_that_kv8_wrote_say_how_they_were_measured(tmp_path: Path) -> None:
    metadata = ScalesFileMetadata("kv8", "absmax", 4096, "tiny", strategy="tensor")
    folder = write_folder(tmp_path, {})
    save_file(
        {name: torch.tensor([value]) for name, value in scale_tensors().items()},
        folder / "model.safetensors",
        metadata.as_shard_text(),
    )
    scale = read_checkpoint(folder, geometry_of()).scales.layer(1).k
    assert scale is not None
    assert str(scale.origin) == (
        "checkpoint: model.layers.1.self_attn.k_scale in model.safetensors "
        "(calibration, 4,096 tokens, absmax)"
    )


def test_an_unbound_scale_is_refused_by_name(tmp_path: Path) -> None:
    """Pitfall 1: a scale tensor that binds to nothing is an error naming it."""
    folder = write_folder(tmp_path, {**scale_tensors(), "model.layers.0.mlp.k_scale": 0.1})
    with pytest.raises(ScaleError, match=r"model\.layers\.0\.mlp\.k_scale"):
        read_checkpoint(folder, geometry_of())


@pytest.mark.parametrize("other", ["attn.k_scale", "kv_scale", "k_proj.k_scale"])
def test_two_tensors_for_one_scale_are_refused(tmp_path: Path, other: str) -> None:
    folder = write_folder(tmp_path, {P.format(0) + "k_scale": 0.1, P.format(0) + other: 0.1})
    with pytest.raises(ScaleError, match="k scale of layer 0") as error:
        read_checkpoint(folder, geometry_of())
    assert P.format(0) + "k_scale" in str(error.value)
    assert P.format(0) + other in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float32])
def test_zero_points_of_zero_are_harmless(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"{P.format(0)}{s}_zero_point": torch.zeros(1).to(dtype) for s in "qkv"}
    found = read_checkpoint(write_folder(tmp_path, {**scale_tensors(), **tensors}), geometry_of())
    assert found.scales.problems == ()
    assert set(tensors) <= found.tensors


@pytest.mark.parametrize("tail", ["k_zero_point", "k_proj.k_bias"])
def test_other_zero_points_spoil_their_scale(tmp_path: Path, tail: str) -> None:
    tensors = {**scale_tensors(), P.format(3) + tail: torch.tensor([0.0, 2.0])}
    found = read_checkpoint(write_folder(tmp_path, tensors), geometry_of())
    (problem,) = found.scales.problems
    assert (problem.layer, problem.side) == (3, "k")
    assert tail in problem.text
    assert found.scales.layer(3).k is None
    assert found.scales.layer(3).v is not None


def test_softmax_weight_scales_are_explained_once(tmp_path: Path) -> None:
    tensors = {f"{P.format(n)}prob_output_scale": 0.002 for n in range(4)}
    found = read_checkpoint(write_folder(tmp_path, {**scale_tensors(), **tensors}), geometry_of())
    (note,) = found.notes
    assert "4 softmax weight scales" in note
    assert "power of two" in note


@pytest.mark.parametrize(
    ("tail", "quantization"),
    [
        ("{side}_proj.output_scale", None),
        ("{side}_scale", {"quant_method": "fp8", "kv_cache_scheme": "static"}),
    ],
)
def test_scales_measured_before_rope_are_said_to_be(
    tmp_path: Path, tail: str, quantization
) -> None:
    tensors = {P.format(0) + tail.format(side=side): 0.1 for side in "kv"}
    found = read_checkpoint(write_folder(tmp_path, tensors, quantization), geometry_of())
    assert any("before the rotary embedding" in note for note in found.notes)
    other = read_checkpoint(write_folder(tmp_path / "b", scale_tensors()), geometry_of())
    assert other.notes == ()


def write_shards(folder: Path) -> None:
    write_folder(folder)
    save_file({P.format(0) + "k_scale": torch.tensor([0.1])}, folder / "a.safetensors")
    save_file({P.format(0) + "v_scale": torch.tensor([0.2])}, folder / "b.safetensors")
    weight_map = {
        P.format(0) + "k_scale": "a.safetensors",
        P.format(0) + "v_scale": "b.safetensors",
    }
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    scales = read_checkpoint(tmp_path, geometry_of()).scales.layer(0)
    assert scales.v is not None
    assert scales.v.origin.detail.endswith("v_scale in b.safetensors")


def test_broken_folders_are_refused_in_one_sentence(tmp_path: Path) -> None:
    geometry = geometry_of()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_checkpoint(tmp_path, geometry)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_checkpoint(tmp_path, geometry)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="expected a JSON object"):
        read_checkpoint(tmp_path, geometry)
    write_shards(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors, which is missing"):
        read_checkpoint(tmp_path, geometry)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="weight_map"):
        read_checkpoint(tmp_path, geometry)


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    file = write_folder(tmp_path, scale_tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is no complete safetensors file"):
        read_checkpoint(tmp_path, geometry_of())


def test_the_same_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({P.format(0) + "k_scale": torch.tensor([0.3])}, tmp_path / "b.safetensors")
    with pytest.raises(ModelError, match=r"a\.safetensors and in b\.safetensors"):
        read_checkpoint(tmp_path, geometry_of())
