"""Headers of safetensors files: read without mapping what they describe."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kv8.errors import ModelError
from kv8.scales.header import read_header
from kv8.scales.tensors import num_values, read_small, tensor_names


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {
        "half": torch.tensor([[0.5, -2.0]], dtype=torch.bfloat16),
        "byte": torch.tensor([0.25, 448.0], dtype=torch.float8_e4m3fn),
        "whole": torch.tensor(7, dtype=torch.int32),
        "none": torch.zeros(0),
        "long": torch.zeros(70_000),
    }
    save_file(tensors, tmp_path / "x.safetensors", {"made by": "a test"})
    return tmp_path / "x.safetensors"


def test_a_header_says_where_every_tensor_lies(file: Path) -> None:
    header = read_header(file)
    assert header.metadata == {"made by": "a test"}
    half = header.tensors["half"]
    assert (half.dtype, half.shape) == ("BF16", (1, 2))
    stored = file.read_bytes()[half.start : half.end]
    assert (
        stored
        == torch.tensor([0.5, -2.0], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    )
    starts = [tensor.start for tensor in header.tensors.values()]
    assert starts == sorted(starts)
    assert max(tensor.end for tensor in header.tensors.values()) == file.stat().st_size


def test_small_tensors_are_read_and_long_ones_are_not(file: Path) -> None:
    read = {tensor.name: tensor for tensor in read_small(tensor_names([file]).items())}
    assert {name: tensor.values for name, tensor in read.items()} == {
        "half": (0.5, -2.0),
        "byte": (0.25, 448.0),
        "whole": (7.0,),
        "none": (),
        "long": (),
    }
    assert read["byte"].dtype == "float8_e4m3fn"
    assert read["whole"].shape == ()
    assert num_values([file]) == 2 + 2 + 1 + 70_000


def test_a_file_larger_than_any_memory_is_described(tmp_path: Path) -> None:
    """`kv8 plan` is for machines that a model may be too large for: nothing maps its weights."""
    num_bytes = 2**43
    text = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (num_bytes, num_bytes)
    file = tmp_path / "large.safetensors"
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        try:
            opened.truncate(8 + len(text) + num_bytes)
        except OSError:
            pytest.skip("this file system has no files of 8 TiB, not even empty ones")
    assert num_values([file]) == num_bytes


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"w": 1}', b'{"w":{"dtype":"U8"}}'])
def test_a_damaged_header_is_an_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ModelError, match="no complete safetensors file"):
        read_header(tmp_path / "x")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere is missing"):
        read_header(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="no complete safetensors file"):
        read_header(tmp_path)
