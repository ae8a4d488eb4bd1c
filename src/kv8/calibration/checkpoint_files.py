"""The files of a written checkpoint: which are taken over, under which name, and how."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kv8.errors import OutputError, RequestError
from kv8.models.conversion_cache import PROVENANCE
from kv8.scales.names import resolve_name
from kv8.scales.storage import explained_failures
from kv8.scales.tensors import read_json, tensor_names, weight_files
from kv8.units import format_bytes

INDEX = "model.safetensors.index.json"

# Written anew, or belonging to the folder they come from.
_OWN_FILES = {
    "config.json",
    INDEX,
    PROVENANCE,
    "kv_scales.safetensors",
    "report.json",
    "report.png",
}
# Weights in formats that nobody would read beside the safetensors files, at double the size.
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_FOLDERS = ("additional_chat_templates",)  # the only folder a tokenizer keeps files in


@dataclass(frozen=True)
class SourceFiles:
    """What is taken over from a model folder.

    Attributes:
        folder: the model folder.
        shards: the files with weights, in the order of their names.
        weights: which of them holds each weight.
        others: tokenizer, generation config, licences and the like, relative to the folder.
    """

    folder: Path
    shards: tuple[Path, ...]
    weights: dict[str, Path]
    others: tuple[Path, ...]

    def shard_name(self, number: int) -> str:
        """Return the written name of shard ``number`` from 0; the scales are in the last one."""
        total = len(self.shards) + 1
        return f"model-{number + 1:05}-of-{total:05}.safetensors"


def source_files(folder: Path) -> SourceFiles:
    """Return what of ``folder`` goes into a checkpoint with new KV cache scales.

    A file that holds nothing but such scales is left out: the new ones take its place.

    Raises:
        RequestError: scales stand in the same file as weights, which are not rewritten.
        ModelError: a file is missing or damaged.
    """
    names = tensor_names(weight_files(folder))
    old = {name for name in names if resolve_name(name) is not None}
    weights = {name: file for name, file in names.items() if name not in old}
    shards = tuple(sorted(set(weights.values())))
    for name in sorted(old):
        if names[name] in shards:
            raise RequestError(
                f"{folder.name} brings KV cache scales in the same file as weights ({name} in "
                f"{names[name].name}), and weights are never rewritten. Calibrate the original "
                f"model, or leave checkpoint (--checkpoint) out: the scales file given with "
                f"kv_scales (--kv-scales) wins over the checkpoint's scales."
            )
    listed = [*folder.iterdir(), *(f for name in _FOLDERS for f in (folder / name).rglob("*"))]
    others = sorted(
        path.relative_to(folder)
        for path in listed
        if path.is_file()
        and path.name not in _OWN_FILES
        and path.suffix not in _OTHER_WEIGHTS
        and not path.name.endswith(".index.json")
        and not path.name.startswith(".")
    )
    return SourceFiles(folder, shards, weights, tuple(others))


def take_over(files: SourceFiles, target: Path) -> None:
    """Put the shards and the other files of ``files`` into the folder ``target``.

    Weights become hard links where the file system allows that: no time, no space, and the same
    bytes for certain. Elsewhere they are copied. Small files are copied always, since people edit
    them.

    Raises:
        OSError: a file cannot be written; names it, its size and the room there is.
    """
    for number, shard in enumerate(files.shards):
        _link_or_copy(shard.resolve(), target / files.shard_name(number))
    for path in files.others:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        _copy(files.folder / path, target / path)


def require_room(files: SourceFiles, parent: Path) -> None:
    """Refuse early what `take_over` would run out of space for in a folder of ``parent``.

    Raises:
        OutputError: the weights are on another disk, and do not fit on this one.
    """
    disk, free = parent.stat().st_dev, shutil.disk_usage(parent).free
    foreign = [file.stat() for file in files.shards if file.stat().st_dev != disk]
    needed = sum(facts.st_size for facts in foreign)
    if free < needed:
        raise OutputError(
            f"The weights of {files.folder} lie on another disk than {parent} and must be copied "
            f"into a checkpoint there: that takes {format_bytes(needed)}, and {format_bytes(free)} "
            f"are free. Free some space, or choose another place."
        )


def total_size(files: SourceFiles) -> int:
    """Return the bytes of all weights, as the index states it."""
    index = files.folder / INDEX
    metadata = read_json(index).get("metadata") if index.is_file() else None
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(stated, int):
        return stated
    return sum(shard.stat().st_size for shard in files.shards)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, a file system without links, or files that are not ours
        needed, free = source.stat().st_size, shutil.disk_usage(target.parent).free
        if free < needed:
            raise OSError(
                f"{source.name} must be copied there, which takes {format_bytes(needed)}, and "
                f"{format_bytes(free)} are free"
            ) from None
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    with explained_failures(target, source.stat().st_size):
        shutil.copyfile(source, target)
