"""Calibration text through Hugging Face's ``datasets`` library, which is an optional extra."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kv8.calibration.packing import Joints
from kv8.calibration.sources_rows import FIELDS, record_tokens
from kv8.errors import RequestError, SourceError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]*(:[\w.-]+)?)?")
_DATA_SUFFIXES = (".jsonl", ".json", ".txt", ".parquet", ".arrow", ".csv")
_PACKED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".zip")
_SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk leaves


def is_dataset_id(name: str) -> bool:
    """Whether ``name`` has the form ``org/name``, ``org/name:config`` or with ``:split`` behind."""
    return _ID.fullmatch(name) is not None


def read_folder(
    path: Path, tokenizer: Any, joints: Joints, split: str = ""
) -> Iterator[Sequence[int]]:
    """Yield the tokens of the rows of a folder of data files, or of one ``save_to_disk`` wrote.

    Args:
        path: the folder.
        tokenizer: the model's.
        joints: the model's begin and end tokens.
        split: which split; ``train``, or the only one there is, unless named.

    Raises:
        RequestError: it holds no data, has no such split, cannot be read, or ``datasets`` is not
            installed.
    """
    path = path.resolve()  # the library takes no "."
    if not os.access(path, os.R_OK | os.X_OK):
        raise RequestError(f"{path} cannot be read: permission denied.")
    if not any(_is_data(file) for file in path.rglob("*")):
        raise RequestError(
            f"{path} is a folder without data: no file in it ends in {', '.join(_DATA_SUFFIXES)}. "
            f"Give a folder of such files, or one .txt or .jsonl file."
        )
    datasets = _library(f"{path} is a folder, which")
    try:
        if any((path / name).is_file() for name in _SAVED):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path), streaming=True)
    except IndexError as error:  # what it makes of a saved dataset of no rows
        raise RequestError(f"{path} holds a dataset without rows.") from error
    except Exception as error:
        raise RequestError(f"{path} cannot be read as a dataset: {_reason(error)}.") from error
    return _rows(found, str(path), split, tokenizer, joints, example=f"{path}:SPLIT")


def read_dataset(name: str, tokenizer: Any, joints: Joints) -> Iterator[Sequence[int]]:
    """Yield the tokens of the rows of a dataset of the hub, fetched as they are needed.

    Args:
        name: ``org/name``, with ``:config`` and ``:split`` where the dataset has several. The
            split is ``train``, or the only one there is, unless named.
        tokenizer: the model's.
        joints: the model's begin and end tokens.

    Raises:
        RequestError: ``datasets`` is not installed, or the dataset has no such configuration or
            split, or no text.
        SourceError: it cannot be fetched.
    """
    hub_id, config, split = [*name.split(":"), "", ""][:3]
    datasets = _library(f"{name} is no local path; as a dataset's hub id it")
    # Streaming fetches no more than is read, but knows nothing of what was fetched before.
    streaming = not datasets.config.HF_HUB_OFFLINE
    try:
        found = datasets.load_dataset(hub_id, config or None, streaming=streaming)
    except (ConnectionError, OSError) as error:
        raise SourceError(
            f"{name} is no local path, and as a dataset of the hub it could not be fetched: "
            f"{_reason(error)}. Check the spelling and the network, or calibrate without one: "
            f"on a .txt or .jsonl file, on a local folder, on random, or on self."
        ) from error
    except Exception as error:
        raise RequestError(
            f"{name} cannot be read as a dataset: {_reason(error)}. A configuration and a split "
            f"are named as {hub_id}:CONFIG:SPLIT."
        ) from error
    return _rows(found, name, split, tokenizer, joints, example=f"{hub_id}:CONFIG:SPLIT")


def _is_data(file: Path) -> bool:
    name = file.name.lower()
    for suffix in _PACKED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name.endswith(_DATA_SUFFIXES) and name not in ("dataset_info.json", "dataset_infos.json")


def _library(what: str) -> Any:
    try:
        return import_module("datasets")
    except ImportError as error:
        raise RequestError(
            f"{what} needs the datasets library, which is not installed: pip install "
            f"'kv8[datasets]'. Without it, calibrate on a .txt or .jsonl file, on random, or on "
            f"self."
        ) from error


def _rows(
    found: Any, name: str, split: str, tokenizer: Any, joints: Joints, *, example: str
) -> Iterator[Sequence[int]]:
    rows = found
    if isinstance(found, Mapping):
        rows = _choose_split(found, name, split, example)
    elif split:
        raise RequestError(f"{name} has no splits, so none can be called {split!r}; leave it out.")
    columns = rows.column_names
    if columns is not None and not set(FIELDS) & set(columns):
        raise RequestError(
            f"{name} has the columns {', '.join(columns)}; calibration reads "
            f"{' or '.join(FIELDS)}. Rename the column, or save the texts as .jsonl."
        )
    return _tokens(rows, name, tokenizer, joints)


def _choose_split(found: Mapping[str, Any], name: str, split: str, example: str) -> Any:
    chosen = split or ("train" if "train" in found or len(found) != 1 else next(iter(found)))
    if chosen not in found:
        raise RequestError(
            f"{name} has no split {chosen!r}; it has {', '.join(map(str, found)) or 'none'}. Name "
            f"one, as {example}."
        )
    return found[chosen]


def _tokens(rows: Any, name: str, tokenizer: Any, joints: Joints) -> Iterator[Sequence[int]]:
    numbered = enumerate(rows, start=1)
    while True:
        try:
            number, row = next(numbered)
        except StopIteration:
            return
        except OSError as error:  # rows are fetched as they are read
            raise SourceError(f"{name} could not be read to its end: {_reason(error)}.") from error
        except Exception as error:
            raise RequestError(f"{name} holds damaged data: {_reason(error)}.") from error
        yield record_tokens(row, tokenizer, joints, f"{name}, row {number}")


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
