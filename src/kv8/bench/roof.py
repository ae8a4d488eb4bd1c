"""The roof: how fast this machine moves memory and multiplies, measured beside what it judges.

Nothing that moves n bytes can take less than n over the bandwidth, and nothing multiplies faster
than the best matrix product; so a share of them says how much is left to gain. On a CPU the
bandwidth is that of reading; on a GPU that of copying, bytes read and bytes written.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch

from kv8.bench.timing import Samples
from kv8.cache.pool import allocate
from kv8.kernels.clock import seconds_of

_BUFFER_BYTES: Final = 2**29  # more than caches hold
_SIDE: Final = 1024
_GPU_SIDE: Final = 8192
_FP8_CAPABILITY: Final = (8, 9)  # the first with matrix units for FP8


class Roof:
    """Takes a sample whenever `sample` is called, in turns with the work that is measured.

    Args:
        dtype: of the matrix product to compare with.
        device: where to measure.

    Attributes:
        way: how memory is moved, ``read`` or ``copy``.
        moved_bytes: bytes that `move_seconds` are about.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.dtype, self.device = dtype, torch.device(device)
        on_gpu = self.device.type == "cuda"
        self._side = _GPU_SIDE if on_gpu else _SIDE
        # No way is the fastest everywhere: the memory's speed is that of whichever is.
        ways = _gpu_copies(self.device) if on_gpu else _readers()
        left, right = (
            torch.randn(self._side, self._side, device=self.device).to(dtype) for _ in range(2)
        )
        self.moved_bytes = _BUFFER_BYTES * (2 if on_gpu else 1)
        self.way = "copy" if on_gpu else "read"
        self._moves: dict[str, tuple[Callable[[], object], list[float]]] = {
            name: (work, []) for name, work in ways.items()
        }
        products: dict[str, Callable[[], object]] = {
            str(dtype).removeprefix("torch."): lambda: left @ right
        }
        if on_gpu and torch.cuda.get_device_capability(self.device) >= _FP8_CAPABILITY:
            products["fp8"] = _fp8_product(self._side, self.device)
        self._products: dict[str, tuple[Callable[[], object], list[float]]] = {
            name: (work, []) for name, work in products.items()
        }
        for _ in range(2 if on_gpu else 1):  # the warm-up
            self.sample()
        for _, values in (*self._moves.values(), *self._products.values()):
            values.clear()

    def sample(self) -> None:
        """Move memory and multiply once more."""
        for work, seconds in (*self._moves.values(), *self._products.values()):
            seconds.append(seconds_of(work, self.device))

    @property
    def move_seconds(self) -> Samples:
        """Seconds of moving `moved_bytes` by the fastest way."""
        ways = (Samples(tuple(values)) for _, values in self._moves.values())
        return min(ways, key=lambda samples: samples.median)

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth."""
        return self.moved_bytes / self.move_seconds.median

    @property
    def matmul_seconds(self) -> Mapping[str, Samples]:
        """Seconds of one matrix product of `matmul_flop` operations, by its type; the first is
        that of ``dtype``.
        """
        return {name: Samples(tuple(seconds)) for name, (_, seconds) in self._products.items()}

    @property
    def matmul_flop(self) -> int:
        """Operations that `matmul_seconds` are about."""
        return 2 * self._side**3

    @property
    def flop_per_second(self) -> float:
        """The speed of the matrix product in ``dtype``."""
        return self.matmul_flop / next(iter(self.matmul_seconds.values())).median


def _readers() -> dict[str, Callable[[], object]]:
    # In large pages, as a cache: from small ones a core reads a third less.
    buffer = allocate(_BUFFER_BYTES, torch.device("cpu")).fill_(1)
    return {
        "sum of int64": lambda: buffer.view(torch.int64).sum(),
        "sum of float32": lambda: buffer.view(torch.float32).sum(),
        "largest int32": lambda: buffer.view(torch.int32).max(),
    }


def _gpu_copies(device: torch.device) -> dict[str, Callable[[], object]]:
    # Random, for zeros are moved with less power, and so at a higher clock.
    source = torch.randint(256, (_BUFFER_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        "copy": lambda: target.copy_(source),
        "copy by a kernel": lambda: torch.add(
            source.view(torch.int64), 1, out=target.view(torch.int64)
        ),
    }


def _fp8_product(side: int, device: torch.device) -> Callable[[], object]:
    left, right = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)
