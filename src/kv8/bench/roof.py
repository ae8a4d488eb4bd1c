"""The roof: how fast this machine reads memory and multiplies, measured beside what it judges.

Nothing that reads n bytes can take less than n over the read bandwidth, and nothing multiplies
faster than the best matrix product; so a share of them says how much is left to gain.
"""

from typing import Final

import torch

from kv8.bench.timing import Samples, seconds_of

_BUFFER_BYTES: Final = 2**29  # more than caches hold
_SIDE: Final = 1024


class Roof:
    """Takes a sample whenever `sample` is called, in turns with the work that is measured.

    Args:
        dtype: of the matrix product to compare with.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        buffer = torch.ones(_BUFFER_BYTES, dtype=torch.uint8)
        left, right = (torch.randn(_SIDE, _SIDE).to(dtype) for _ in range(2))
        # No reader is the fastest everywhere: the memory's speed is that of whichever is.
        self._readers = {
            "sum of int64": lambda: buffer.view(torch.int64).sum(),
            "sum of float32": lambda: buffer.view(torch.float32).sum(),
            "largest int32": lambda: buffer.view(torch.int32).max(),
        }
        self._multiply = lambda: left @ right
        self._read_seconds: dict[str, list[float]] = {name: [] for name in self._readers}
        self._multiply_seconds: list[float] = []
        self.sample()
        for values in (*self._read_seconds.values(), self._multiply_seconds):
            values.clear()  # that was the warm-up

    def sample(self) -> None:
        """Read and multiply once more."""
        for name, read in self._readers.items():
            self._read_seconds[name].append(seconds_of(read))
        self._multiply_seconds.append(seconds_of(self._multiply))

    @property
    def read_seconds(self) -> Samples:
        """Seconds of reading `read_bytes` by the fastest way."""
        readers = (Samples(tuple(values)) for values in self._read_seconds.values())
        return min(readers, key=lambda samples: samples.median)

    @property
    def read_bytes(self) -> int:
        """Bytes that `read_seconds` are about."""
        return _BUFFER_BYTES

    @property
    def bytes_per_second(self) -> float:
        """The read bandwidth."""
        return _BUFFER_BYTES / self.read_seconds.median

    @property
    def matmul_seconds(self) -> Samples:
        """Seconds of one matrix product of `matmul_flop` operations."""
        return Samples(tuple(self._multiply_seconds))

    @property
    def matmul_flop(self) -> int:
        """Operations that `matmul_seconds` are about."""
        return 2 * _SIDE**3

    @property
    def flop_per_second(self) -> float:
        """The speed of the matrix product."""
        return self.matmul_flop / self.matmul_seconds.median
