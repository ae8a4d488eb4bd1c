"""Writes small safetensors files: the same content gives the same bytes, and has a checksum.

The library's own writer puts the entries of a header in another order in every process, and raises
an error of its own, which is no `OSError`, where the disk is full. The format is simple enough to
be written here; it is read with the library.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from kv8.scales.storage import write_whole

CHECKSUM: Final = "checksum"  # the header's entry, where there is one

_CODES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}
_ALIGNMENT: Final = 8


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file, whole or not at all; an existing file is replaced.

    Args:
        path: the file.
        tensors: what it holds, by name.
        metadata: the text entries of its header.

    Raises:
        OSError: it cannot be written; names the file, the bytes it takes and those that are free.
    """
    # As the library does: wide elements first, so that every tensor is aligned to its own.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    content, end = [], 0
    for name in names:
        raw = _raw(tensors[name])
        start, end = end, end + raw.nbytes
        content.append(raw)
        header[name] = {
            "dtype": _CODES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    write_whole(path, [len(text).to_bytes(8, "little"), text, *content])


def checksum(tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str] | None = None) -> str:
    """Return 32 hex digits that differ whenever a name, type, shape or bit of ``tensors`` does.

    Entries of a header that are to be told from changed ones, too, are given as ``facts``.
    """
    found = hashlib.blake2b(json.dumps(sorted((facts or {}).items())).encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(_raw(tensor))
    return found.hexdigest()


def _raw(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes as they lie in memory, which on every machine kv8 runs on is little
    endian, as the format wants it.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)
