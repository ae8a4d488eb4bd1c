"""Headers of safetensors files: which tensors, of what type and shape, and where their bytes lie.

safetensors checks a header against its file, and is asked to do just that: for torch it would map
the whole file as memory of its own, which fails for one that is larger than the machine's memory.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kv8.errors import ModelError

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is in its file.

    Attributes:
        dtype: safetensors' name of its type; see `TORCH_DTYPES`.
        shape: of the tensor.
        start: its first byte, from the file's beginning.
        end: the byte after its last.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself.

    Attributes:
        tensors: by name, in the order of their bytes.
        metadata: text entries.
    """

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_header(file: Path) -> Header:
    """Return the header of ``file``, which was checked: its tensors fill the file without gaps.

    Raises:
        ModelError: the file is missing, truncated or damaged.
    """
    try:
        with safe_open(file, "np"), file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            entries = json.loads(opened.read(length))
    except FileNotFoundError:
        raise ModelError(f"{file} is missing.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{file} is no complete safetensors file ({error}). Fetch or write it again."
        ) from error
    metadata = entries.pop("__metadata__", None) or {}
    first = 8 + length
    tensors = {
        name: StoredTensor(
            entry["dtype"],
            tuple(entry["shape"]),
            first + entry["data_offsets"][0],
            first + entry["data_offsets"][1],
        )
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    }
    return Header(tensors, metadata)
