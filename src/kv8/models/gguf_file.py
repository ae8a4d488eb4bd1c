"""Read a GGUF file: metadata and where each tensor's bytes lie. Every length is checked first.

Format: the GGUF specification, versions 2 and 3, little-endian. Written out here rather than taken
from the `gguf` package because that reader trusts the counts in the file and builds one array per
scalar: a damaged file hangs it, and a vocabulary of 262,144 entries takes it many seconds.
"""

import math
import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from kv8.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
_PIECE_VALUES = 2**22
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a file.

    Attributes:
        name: its GGUF name (``blk.0.attn_q.weight``).
        shape: sizes in row-major order, the last one contiguous (GGUF lists them the other way).
        type: how its values are packed.
        start: first byte in the file.
        num_bytes: packed bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """An open file: metadata by key, tensors by name, and the mapped bytes behind them."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap

    @property
    def architecture(self) -> str:
        """The architecture's GGUF name (``llama``)."""
        return str(self.metadata["general.architecture"])

    def values(self, name: str) -> NDArray[np.float32]:
        """Return tensor ``name`` unpacked to float32, in its row-major shape."""
        return np.concatenate(list(self.pieces(name))).reshape(self.tensors[name].shape)

    def pieces(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Yield tensor ``name`` unpacked to float32, a few whole rows at a time, flat."""
        tensor = self.tensors[name]
        block_values, block_bytes = GGML_QUANT_SIZES[tensor.type]
        row_bytes = tensor.shape[-1] // block_values * block_bytes
        num_rows = max(1, _PIECE_VALUES // tensor.shape[-1])
        end = tensor.start + tensor.num_bytes
        for start in range(tensor.start, end, num_rows * row_bytes):
            num_bytes = min(num_rows * row_bytes, end - start)
            packed = np.frombuffer(self.data, np.uint8, num_bytes, start)
            # A copy, for some types come back as a view of the mapping, which must close.
            yield np.array(self._unpack(tensor, packed.reshape(-1, row_bytes))).reshape(-1)

    def _unpack(self, tensor: GGUFTensor, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
        try:
            values: NDArray[np.float32] = dequantize(rows, tensor.type)
        except NotImplementedError:
            raise ModelError(
                f"{self.path.name}: tensor {tensor.name} is packed as {tensor.type.name}, which "
                f"cannot be unpacked. Use a file packed otherwise (Q4_K_M, Q8_0, F16, ...)."
            ) from None
        return values


@contextmanager
def open_gguf(path: Path) -> Iterator[GGUFFile]:
    """Open ``path``, check its structure against its size, and close it at the end.

    Raises:
        ModelError: no GGUF file, a version or type not known, or bytes missing.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield _parse(path, data)
    except (OSError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} cannot be read: {error}.") from error


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    if data[:4] != MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it starts with {data[:4]!r}, not {MAGIC!r}.")
    cursor = _Cursor(path, data, position=4)
    version = cursor.scalar("I")
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise ModelError(
            f"{path} has GGUF version {version} (big-endian, or newer); readable: {known}."
        )
    num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = dict(cursor.entry() for _ in cursor.counted(num_entries, smallest=13))
    if not isinstance(metadata.get("general.architecture"), str):
        raise ModelError(f"{path} does not say its architecture (general.architecture).")
    headers = [cursor.tensor_header() for _ in cursor.counted(num_tensors, smallest=24)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{path}: general.alignment={alignment!r} is no power of two.")
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in headers:
        tensor = _place(path, name, shape, kind, base + offset)
        if tensor.start + tensor.num_bytes > len(data):
            raise ModelError(
                f"{path} is cut short: tensor {name} ends at byte "
                f"{tensor.start + tensor.num_bytes:,}, the file at {len(data):,}. Fetch it again."
            )
        if name in tensors:
            raise ModelError(f"{path} holds tensor {name} twice.")
        tensors[name] = tensor
    return GGUFFile(path, metadata, tensors, data)


def _place(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> GGUFTensor:
    try:
        packing = GGMLQuantizationType(kind)
    except ValueError:
        raise ModelError(f"{path}: tensor {name} has an unknown packing (type {kind}).") from None
    block_values, block_bytes = GGML_QUANT_SIZES[packing]
    if not shape or min(shape) < 1 or shape[-1] % block_values:
        raise ModelError(f"{path}: tensor {name} of shape {shape} cannot be {packing.name}.")
    return GGUFTensor(name, shape, packing, start, math.prod(shape) // block_values * block_bytes)


@dataclass
class _Cursor:
    """Walks the header; refuses to step past the end of the file."""

    path: Path
    data: mmap.mmap
    position: int

    def take(self, num_bytes: int) -> int:
        """Advance over ``num_bytes`` and return where they start."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise ModelError(
                f"{self.path} is cut short or damaged: its header wants {num_bytes:,} bytes at "
                f"byte {start:,} of {len(self.data):,}. Fetch it again."
            )
        self.position = start + num_bytes
        return start

    def counted(self, count: int, *, smallest: int) -> range:
        """Return ``range(count)`` if so many items of ``smallest`` bytes can still follow."""
        position = self.position
        self.take(count * smallest)
        self.position = position
        return range(count)

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        num_bytes = self.scalar("Q")
        start = self.take(num_bytes)
        # Vocabularies hold raw bytes now and then; surrogates keep them apart from real text.
        return self.data[start : start + num_bytes].decode("utf-8", "surrogateescape")

    def entry(self) -> tuple[str, Any]:
        key = self.string()
        return key, self.value(self.scalar("I"))

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _BOOL:
            return bool(self.scalar("B"))
        if kind == _ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"))
        if kind not in _SCALARS:
            raise ModelError(f"{self.path} is damaged: metadata of unknown type {kind}.")
        return self.scalar(_SCALARS[kind])

    def array(self, kind: int, count: int) -> list[Any]:
        readers: dict[int, tuple[int, Callable[[], Any]]] = {
            _STRING: (8, self.string),
            _BOOL: (1, lambda: bool(self.scalar("B"))),
        }
        if kind in readers:
            smallest, read = readers[kind]
            return [read() for _ in self.counted(count, smallest=smallest)]
        if kind not in _SCALARS:
            raise ModelError(f"{self.path} is damaged: an array of unknown type {kind}.")
        dtype = np.dtype(f"<{_SCALARS[kind]}")
        start = self.take(count * dtype.itemsize)
        values: list[Any] = np.frombuffer(self.data, dtype, count, start).tolist()
        return values

    def tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dimensions = self.scalar("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ModelError(
                f"{self.path} is damaged: tensor {name!r} has {num_dimensions} dimensions."
            )
        shape = tuple(self.scalar("Q") for _ in range(num_dimensions))
        return name, shape[::-1], self.scalar("I"), self.scalar("Q")
