"""Reads names, shapes and single small tensors of a folder's safetensors files, never weights."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kv8.errors import ModelError


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
        for name in _keys(file):
            if name in found:
                raise ModelError(f"Tensor {name} is in {found[name].name} and in {file.name}.")
            found[name] = file
    return found


def num_values(files: Iterable[Path]) -> int:
    """Return how many numbers the tensors in ``files`` hold, from the files' headers.

    Raises:
        ModelError: a file is truncated or damaged.
    """
    total = 0
    for file in files:
        with _open(file) as opened:
            total += sum(math.prod(opened.get_slice(n).get_shape()) for n in opened.keys())  # noqa: SIM118
    return total


def read_small(tensors: Iterable[tuple[str, Path]]) -> Iterator[SmallTensor]:
    """Read the named tensors, opening each file once; order is by file, then name."""
    for file, group in groupby(sorted(tensors, key=lambda t: (t[1], t[0])), key=lambda t: t[1]):
        with _open(file) as opened:
            for name, _ in group:
                shape = tuple(opened.get_slice(name).get_shape())
                values: tuple[float, ...] = ()
                dtype = str(opened.get_slice(name).get_dtype())
                if math.prod(shape) <= _MOST_VALUES:
                    tensor = opened.get_tensor(name)
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    values = tuple(tensor.to(torch.float32).flatten().tolist())
                yield SmallTensor(name, file.name, shape, dtype, values)


def file_metadata(file: Path) -> dict[str, str]:
    """Return the text entries of a safetensors file's header."""
    with _open(file) as opened:
        return dict(opened.metadata() or {})


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a small file."""
    with _open(file) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


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


def _keys(file: Path) -> list[str]:
    with _open(file) as opened:
        return list(opened.keys())


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ModelError(f"{file} is missing.") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{file} is no complete safetensors file ({error}). Fetch or write it again."
        ) from error
