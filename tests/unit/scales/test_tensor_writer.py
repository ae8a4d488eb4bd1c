"""Safetensors files of kv8's own: read by the library, the same bytes every time, checked."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kv8.scales.tensor_writer import checksum, write_tensors

TENSORS = {
    "b": torch.tensor([1.5, -2.0]),
    "a": torch.arange(6, dtype=torch.int64).reshape(2, 3).T,  # not contiguous
    "c": torch.tensor(3.0, dtype=torch.bfloat16),
    "d": torch.tensor([1, 2, 3], dtype=torch.int32),
    "e": torch.zeros(0, 4),
    "f": torch.tensor([0.5], dtype=torch.float64),
}


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, {"name": "é", "other": "1"})
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"name": "é", "other": "1"}
    assert list(tmp_path.iterdir()) == [path]
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode


WRITES = """
import sys
from pathlib import Path
import torch
from kv8.scales.tensor_writer import write_tensors
names = ["k", "q", "v"]
write_tensors(Path(sys.argv[1]), {n: torch.ones(3) for n in names}, {n: n for n in names})
"""


def test_equal_content_is_equal_bytes_in_every_process(tmp_path: Path) -> None:
    for seed in "12":  # of the hashes that order a set
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        subprocess.run([sys.executable, "-c", WRITES, tmp_path / seed], env=environment, check=True)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@pytest.mark.parametrize(
    "other",
    [
        {**TENSORS, "b": torch.tensor([1.5, -2.0000002])},
        {**TENSORS, "b": torch.tensor([[1.5, -2.0]])},
        {**TENSORS, "b": TENSORS["b"].view(torch.int32)},
        {("x" if name == "b" else name): tensor for name, tensor in TENSORS.items()},
    ],
)
def test_any_difference_changes_the_checksum(other: dict[str, torch.Tensor]) -> None:
    assert checksum(dict(reversed(TENSORS.items()))) == checksum(TENSORS)
    assert checksum(other) != checksum(TENSORS)
    assert checksum(TENSORS, {"a": "1"}) != checksum(TENSORS, {"a": "2"})
