"""Which device an engine takes, and what is refused before anything is read."""

import pytest
import torch

from kv8.engine.devices import choose_block_size, describe_device, resolve_device
from kv8.engine.resolve import resolve_options
from kv8.engine.resolve_memory import gpu_cache_memory
from kv8.errors import RequestError
from kv8.options import EngineOptions


class Gpus:
    """Stands in for `torch.cuda` with a number of devices."""

    def __init__(self, number: int, current: int = 0):
        self._number, self._current = number, current

    def is_available(self) -> bool:
        return self._number > 0

    def device_count(self) -> int:
        return self._number

    def current_device(self) -> int:
        return self._current

    def get_device_name(self, device) -> str:
        return f"GPU {torch.device(device).index if not isinstance(device, int) else device}"

    def get_device_properties(self, _device):
        return type("Properties", (), {"total_memory": 80 * 2**30})

    def mem_get_info(self, _device):
        return 60 * 2**30, 80 * 2**30


@pytest.fixture
def gpus(monkeypatch):
    return lambda *given: monkeypatch.setattr(torch, "cuda", Gpus(*given))


@pytest.mark.parametrize(
    ("asked", "number", "current", "expected"),
    [
        ("auto", 0, 0, "cpu"),
        ("auto", 2, 1, "cuda:1"),
        ("cpu", 2, 0, "cpu"),
        ("cuda", 2, 1, "cuda:1"),
        ("cuda:0", 2, 1, "cuda:0"),
    ],
)
def test_what_is_taken(asked, number, current, expected, gpus) -> None:
    gpus(number, current)
    device, reason = resolve_device(asked)
    assert str(device) == expected
    assert reason


def test_a_gpu_that_is_not_there_is_refused(gpus, monkeypatch) -> None:
    gpus(0)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RequestError, match=r"'cuda:1'.*built without CUDA.*device=cpu"):
        resolve_device("cuda:1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RequestError, match="no usable GPU or driver"):
        resolve_device("cuda")
    gpus(2)
    with pytest.raises(RequestError, match=r"'cuda:2'.*cuda:0 \(GPU 0\), cuda:1 \(GPU 1\)"):
        resolve_device("cuda:2")


def test_a_gpu_is_described_with_its_memory(gpus) -> None:
    gpus(2)
    assert describe_device(torch.device("cuda", 1)) == "cuda:1 (GPU 1, 80.00 GiB)"
    assert describe_device(torch.device("cpu")) == "cpu"


def test_blocks_are_larger_on_a_gpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert choose_block_size(None, cpu) == 16
    assert choose_block_size(None, gpu) == 64
    assert choose_block_size(8, cpu) == choose_block_size(8, gpu) == 8


def test_refused_before_the_model_is_looked_at(monkeypatch) -> None:
    monkeypatch.setattr("kv8.engine.resolve.resolve_source", lambda _: pytest.fail("looked at"))
    for options, message in (
        ({"device": "cpu", "gpu_memory_utilization": 0.5}, "runs on the CPU.*kv_cache_memory"),
        ({"device": "cuda:99"}, "device='cuda:99'"),
    ):
        with pytest.raises(RequestError, match=message):
            resolve_options(EngineOptions(model="m", **options))


def test_the_settings_name_the_device(tiny_model) -> None:
    config = resolve_options(EngineOptions(model=str(tiny_model("llama")), device="cpu"))
    assert "device = cpu (as asked)" in config.describe()


def test_the_estimate_before_weights_are_there(gpus) -> None:
    gpus(1)
    gib = 2**30

    def size(share, weights, useful=2**60):
        device = torch.device("cuda", 0)
        return gpu_cache_memory(device, share=share, weight_bytes=weights, useful_bytes=useful)

    assert size(None, 14 * gib)[0] == 40 * gib
    assert "90 % of the 60.00 GiB free" in size(None, 14 * gib)[1]
    assert size(0.5, 14 * gib)[0] == 16 * gib
    assert size(0.5, 40 * gib)[0] == 0
    assert size(0.9, 14 * gib, useful=gib)[0] == gib
