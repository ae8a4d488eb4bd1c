"""Scales files: written whole, read strictly."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint_folders import SMOLLM2, geometry_of, golden_tensors, scale_tensors

from kv8.errors import ModelError, ScaleError
from kv8.scales.from_python import scales_from_mapping
from kv8.scales.provenance import ScalesFileMetadata, parse_header
from kv8.scales.scale import LayerScales, ModelScales, Origin, OriginKind, Scale
from kv8.scales.scales_file import (
    geometry_fingerprint,
    read_scales_file,
    write_scales_file,
)
from kv8.scales.tensors import file_metadata

GEOMETRY = geometry_of()
METADATA = ScalesFileMetadata(
    producer="kv8 0.1.0",
    statistic="absmax",
    num_tokens=4096,
    model="tiny",
    geometry=geometry_fingerprint(GEOMETRY),
    versions={"torch": "2.13.0"},
)
SCALES = scales_from_mapping(
    {n: {"k": 0.05, "v": [0.1, 0.2], "q": [0.1] * 4} for n in range(4)}, GEOMETRY
)


def test_what_is_written_is_read_back_exactly(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    write_scales_file(file, SCALES, METADATA)
    found = read_scales_file(file, GEOMETRY)
    assert found.fingerprint() == SCALES.fingerprint()
    scale = found.layer(2).v
    assert scale is not None
    assert str(scale.origin) == (
        "calibration, 4,096 tokens, absmax (layers.2.v_scale in scales.safetensors)"
    )
    assert scale.origin.kind is OriginKind.CALIBRATION
    assert found.warnings == ()


def test_scales_that_kv8_did_not_write_have_the_file_as_their_origin(tmp_path: Path) -> None:
    found = read_scales_file(save(tmp_path, {"layers.0.k_scale": ONE}), GEOMETRY)
    scale = found.layer(0).k
    assert scale is not None
    assert scale.origin == Origin(OriginKind.FILE, "layers.0.k_scale in mine.safetensors")


def test_other_weights_are_a_warning_and_the_same_are_none(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    write_scales_file(file, SCALES, replace(METADATA, weights="abc"))
    assert read_scales_file(file, GEOMETRY, lambda: "abc").warnings == ()
    [warning] = read_scales_file(file, GEOMETRY, lambda: "def").warnings
    assert "measured with other weights (tiny)" in warning
    assert "kv8 calibrate" in warning


def test_what_one_scale_is_per_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    write_scales_file(file, SCALES, replace(METADATA, strategy="tensor"))
    with pytest.raises(ScaleError, match="strategy is 'tensor'"):
        read_scales_file(file, GEOMETRY)


def test_the_format_they_were_made_for_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    for name in ("fp8_e4m3", "fp8_e5m2"):
        write_scales_file(file, SCALES, replace(METADATA, kv_cache_dtype=name))
        assert read_scales_file(file, GEOMETRY).made_for == name


def test_the_file_explains_itself(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    write_scales_file(file, SCALES, METADATA)
    header = file_metadata(file)
    assert parse_header(header, "scales") == METADATA
    assert len(header["checksum"]) == 32
    assert header["format"] == "kv8-scales"
    assert header["version"] == "1"
    assert header["statistic"] == "absmax"
    assert header["num_tokens"] == "4096"
    assert header["version_of_torch"] == "2.13.0"
    tensors = load_file(file)
    assert tensors["layers.0.v_scale"].dtype == torch.float32
    assert set(tensors) == {f"layers.{n}.{s}_scale" for n in range(4) for s in "qkv"}


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    for _ in range(2):
        write_scales_file(file, SCALES, METADATA)
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "scales.safetensors"
    file.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("os.fsync", full)
    told = r"scales\.safetensors takes 1\..* KiB: no space left on device \(.* are free\)"
    with pytest.raises(OSError, match=told):
        write_scales_file(file, SCALES, METADATA)
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_bad_or_no_scales_are_not_written(tmp_path: Path) -> None:
    bad = ModelScales({0: LayerScales(k=Scale((0.0,), Origin(OriginKind.CALIBRATION)))})
    for scales, match in ((bad, r"Layer 0, k.*zero"), (ModelScales(), "no scales")):
        with pytest.raises(ScaleError, match=match):
            write_scales_file(tmp_path / "scales.safetensors", scales, METADATA)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match=r"scales\.safetensors takes .*: No such file"):
        write_scales_file(tmp_path / "missing" / "scales.safetensors", SCALES, METADATA)


def save(folder: Path, tensors: dict[str, torch.Tensor], **header: str) -> Path:
    file = folder / "mine.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, header or None)
    return file


def test_a_checkpoints_names_are_understood_too(tmp_path: Path) -> None:
    """Pitfall 7: outside scales go through the same table of names as a checkpoint's."""
    tensors = {name: torch.tensor([value]) for name, value in scale_tensors().items()}
    assert len(read_scales_file(save(tmp_path, tensors), GEOMETRY).layers) == 4
    golden = save(tmp_path, golden_tensors("kvattn-attn_head"))
    assert len(read_scales_file(golden, SMOLLM2).layers) == 30


def test_unusable_q_scales_are_left_to_the_resolution(tmp_path: Path) -> None:
    file = save(tmp_path, golden_tensors("kvattn-tensor-llmc0.14.0.1"))
    found = read_scales_file(file, SMOLLM2)
    assert {problem.side for problem in found.problems} == {"q"}


ONE = torch.tensor([0.5])


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"layers.99.k_scale": ONE}, "layers.99.k_scale"),
        ({"layers.0.k_scale": ONE, "model.norm.weight": ONE}, "model.norm.weight"),
        ({"layers.0.k_scal": ONE}, "layers.0.k_scal"),
        ({"0.k": ONE}, "0.k"),
        ({"layers.0.k_scale": torch.ones(3)}, "shape [3]"),
        ({"layers.0.v_scale": torch.tensor([float("nan")])}, "layers.0.v_scale"),
        ({"layers.0.v_scale": torch.tensor([0.5, 0.0])}, "head 1 is zero"),
        ({"layers.0.v_scale": torch.tensor([1])}, "dtype int64"),
        ({"layers.0.k_scale": ONE, "model.layers.0.self_attn.k_scale": ONE}, "Two tensors"),
        ({}, "no scales"),
    ],
)
def test_what_is_no_scale_of_this_model_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, torch.Tensor], named: str
) -> None:
    """Pitfall 7: unknown layers and unused entries of a scales file are errors."""
    with pytest.raises(ScaleError) as error:
        read_scales_file(save(tmp_path, tensors), GEOMETRY)
    assert named in str(error.value)


def test_another_models_file_and_a_newer_version_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "scales.safetensors"
    write_scales_file(file, SCALES, METADATA)
    other = geometry_of(heads=8)
    with pytest.raises(ScaleError, match=r"another model \(tiny\)"):
        read_scales_file(file, other)
    newer = save(tmp_path, {"layers.0.k_scale": ONE}, format="kv8-scales", version="2")
    with pytest.raises(ScaleError, match="version '2'"):
        read_scales_file(newer, GEOMETRY)


@pytest.mark.parametrize("change", ["a bit", "k for v"])
def test_scales_that_are_not_those_written_are_refused_by_name(tmp_path: Path, change: str) -> None:
    file = tmp_path / "scales.safetensors"
    write_scales_file(file, SCALES, METADATA)
    content = file.read_bytes()
    if change == "a bit":
        content = content[:-1] + bytes([content[-1] ^ 1])  # the last scale's exponent
    else:
        k, v = (content.index(f'"layers.1.{side}_scale"'.encode()) for side in "kv")
        swapped = bytearray(content)
        swapped[k + 10], swapped[v + 10] = content[v + 10], content[k + 10]
        content = bytes(swapped)
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"scales\.safetensors is damaged: the checksum"):
        read_scales_file(file, GEOMETRY)


def test_a_file_without_a_checksum_is_read(tmp_path: Path) -> None:
    """Older versions of kv8 wrote none, and what others call so is not ours."""
    tensors = {"layers.0.k_scale": ONE}
    old = save(tmp_path, tensors, **METADATA.as_text())
    assert len(read_scales_file(old, GEOMETRY).layers) == 1
    foreign = save(tmp_path, tensors, checksum="of something else")
    assert len(read_scales_file(foreign, GEOMETRY).layers) == 1


def test_equal_scales_are_equal_bytes(tmp_path: Path) -> None:
    for name in "ab":
        write_scales_file(tmp_path / name, SCALES, METADATA)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("entry", "value", "allowed"),
    [
        ("num_tokens", "-1", "a whole number of at least 0"),
        ("num_tokens", "4096.0", "a whole number of at least 0"),
        ("num_tokens", "many", "a whole number of at least 0"),
        ("num_tokens", "", "a whole number of at least 0"),
        ("num_tokens", "9" * 5000, "a whole number of at least 0"),
        ("strategy", "channel", "tensor or attn_head, or left out"),
        ("kv_cache_dtype", "fp9", "fp8_e4m3 or fp8_e5m2"),
    ],
)
def test_provenance_is_read_strictly(tmp_path: Path, entry: str, value: str, allowed: str) -> None:
    header = METADATA.as_text() | {entry: value}
    file = save(tmp_path, {"layers.0.k_scale": ONE}, **header)
    told = (
        rf"mine\.safetensors: {entry} in its header is .*, and must be .*{allowed}.*calibrate again"
    )
    with pytest.raises(ScaleError, match=told):
        read_scales_file(file, GEOMETRY)


def test_no_file_and_no_safetensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"kv_scales: .*none\.safetensors is missing"):
        read_scales_file(tmp_path / "none.safetensors", GEOMETRY)
    with pytest.raises(ModelError, match=rf"kv_scales: {tmp_path} is not a file"):
        read_scales_file(tmp_path, GEOMETRY)
    text = tmp_path / "scales.json"
    text.write_text('{"0": {"k": 0.5}}')
    with pytest.raises(ModelError, match=r"scales\.json is no complete safetensors file"):
        read_scales_file(text, GEOMETRY)
