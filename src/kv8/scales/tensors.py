"""Reads names, shapes and single small tensors of a folder's safetensors files, never weights."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kv8.errors import ModelError
from kv8.scales.header import TORCH_DTYPES, StoredTensor, read_header


@dataclass(frozen=True)
class SmallTensor:
    """A tensor of few numbers, read.

    Attributes:
        name: as in the file.
        file: the file's name.
        shape: as in the file.
        dtype: name of its torch dtype.
        values: flattened, as float32 rounds them; empty if the tensor was not worth reading.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    values: tuple[float, ...]


# No scale has more elements than a model has heads; beyond this a tensor is judged by its shape.
_MOST_VALUES = 65536


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files transformers would load from ``folder`` (none is no error).

    Raises:
        ModelError: the index cannot be read, or a file it lists is missing.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if not index.is_file():
        return ()
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
        raise ModelError(f"{index}: no weight_map that says which file holds which tensor.")
    files = tuple(folder / name for name in sorted(set(listed.values())))
    for file in files:
        if not file.is_file():
            raise ModelError(f"{index.name} lists {file.name}, which is missing from {folder}.")
    return files


def tensor_names(files: Iterable[Path]) -> dict[str, Path]:
    """Return which of ``files`` holds each tensor, from the files' headers.

    Raises:
        ModelError: a file is truncated or damaged, or two files hold a tensor of the same name.
    """
    found: dict[str, Path] = {}
    for file in files:
        for name in read_header(file).tensors:
            if name in found:
                raise ModelError(f"Tensor {name} is in {found[name].name} and in {file.name}.")
            found[name] = file
    return found


def num_values(files: Iterable[Path]) -> int:
    """Return how many numbers the tensors in ``files`` hold, from the files' headers.

    Raises:
        ModelError: a file is truncated or damaged.
    """
    return sum(
        math.prod(tensor.shape) for file in files for tensor in read_header(file).tensors.values()
    )


def read_small(tensors: Iterable[tuple[str, Path]]) -> Iterator[SmallTensor]:
    """Read the named tensors, opening each file once; order is by file, then name."""
    for file, group in groupby(sorted(tensors, key=lambda t: (t[1], t[0])), key=lambda t: t[1]):
        header = read_header(file)
        for name, _ in group:
            stored = header.tensors[name]
            dtype = stored.dtype
            values: tuple[float, ...] = ()
            if math.prod(stored.shape) <= _MOST_VALUES and dtype in TORCH_DTYPES:
                dtype = str(TORCH_DTYPES[dtype]).removeprefix("torch.")
                values = _values(file, stored)
            yield SmallTensor(name, file.name, stored.shape, dtype, values)


def file_metadata(file: Path) -> dict[str, str]:
    """Return the text entries of a safetensors file's header."""
    return dict(read_header(file).metadata)


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a small file."""
    read_header(file)
    tensors: dict[str, torch.Tensor] = load_file(file)
    return tensors


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``.

    Raises:
        ModelError: the file is missing, is not JSON, or holds something other than an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} is missing.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds {type(value).__name__}, expected a JSON object.")
    return value


def _values(file: Path, stored: StoredTensor) -> tuple[float, ...]:
    with file.open("rb") as opened:
        opened.seek(stored.start)
        content = bytearray(opened.read(stored.end - stored.start))
    if not content:
        return ()
    tensor = torch.frombuffer(content, dtype=TORCH_DTYPES[stored.dtype])
    return tuple(tensor.to(torch.float32).tolist())
