"""Check a Hugging Face style model folder before anything is read from it in earnest."""

import json
from pathlib import Path
from typing import Any

from kv8.errors import ModelError

INDEX = "model.safetensors.index.json"
_GENERATION = "generation_config.json"
# safetensors itself refuses longer headers.
_MAX_HEADER_BYTES = 100_000_000


def check_folder(folder: Path) -> None:
    """Check that ``folder`` holds a config, whole weights (reads headers only) and, if it lists
    end tokens beside the config, that these are token numbers.

    Raises:
        ModelError: something is missing, cut short or unreadable; names the file and the remedy.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder, a .gguf file, a hub id or a built-in name.")
    config = read_json_object(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{folder / 'config.json'} has no model_type, so nobody can tell what model it is. "
            f"Use a folder written by save_pretrained, or fetch the config again."
        )
    if (folder / _GENERATION).exists():
        _check_end_tokens(folder / _GENERATION)
    for path in _weight_files(folder):
        _check_safetensors(path)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``.

    Raises:
        ModelError: the file is missing or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}: it is no model folder, or only a part of one."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}. Fetch it again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(content).__name__}.")
    return content


def _check_end_tokens(path: Path) -> None:
    """Refuse what transformers would pass over in silence: a chat that then never ends."""
    tokens = read_json_object(path).get("eos_token_id")
    listed = tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]
    if not all(type(token) is int for token in listed):
        raise ModelError(
            f"{path}: eos_token_id must be a token number or a list of them, got {tokens!r:.80}. "
            f"Fetch it again."
        )


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        weight_map = read_json_object(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / INDEX} has no weight_map. Fetch it again.")
        paths = [folder / str(name) for name in sorted({str(v) for v in weight_map.values()})]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ModelError(
                f"{folder} lacks {', '.join(missing)}, which {INDEX} lists. Fetch them again."
            )
        return paths
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        others = sorted(path.name for path in folder.glob("*.bin"))
        found = f" ({', '.join(others[:3])} cannot be used)" if others else ""
        raise ModelError(
            f"{folder} has no *.safetensors weights{found}. Save the model with save_pretrained."
        )
    return paths


def _check_safetensors(path: Path) -> None:
    """Compare what the header promises with the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(
                f"{path} is cut short, or no safetensors file: {size:,} bytes do not hold its "
                f"header. Fetch it again."
            )
        raw = file.read(header_bytes)
    try:
        entries = json.loads(raw)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name[:2] != "__"]
        wanted = 8 + header_bytes + max(ends, default=0)
    except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{path} has a damaged header ({error!r}). Fetch it again.") from error
    if wanted != size:
        verb = "is cut short" if size < wanted else "is longer than its header says"
        raise ModelError(f"{path} {verb}: {size:,} bytes of {wanted:,}. Fetch it again.")
