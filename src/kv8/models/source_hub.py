"""Fetch a model folder from the Hugging Face hub, or find it in the hub's local cache."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from kv8.errors import ModelError, SourceError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")


def is_hub_id(model: str) -> bool:
    """Whether ``model`` has the form of a hub id, ``organisation/name``."""
    return _HUB_ID.fullmatch(model) is not None


def fetch_from_hub(model: str, files: Sequence[str], check: Callable[[Path], None]) -> Path:
    """Return the folder of hub id ``model``: the local cache's if whole, else freshly fetched.

    Args:
        model: the hub id.
        files: patterns of the files wanted.
        check: raises `ModelError` for a folder that is not whole.

    Raises:
        SourceError: it is not in the cache and the hub cannot be reached.
        ModelError: the hub has no such model, keeps it from this user, or it is not whole.
    """
    try:
        folder = Path(snapshot_download(model, local_files_only=True))
        check(folder)
    except (LocalEntryNotFoundError, ModelError):
        folder = _download(model, files)
    try:
        check(folder)
    except ModelError as error:
        # Without network the client hands out what part of a model it has, as if it were all.
        raise ModelError(f"{model} is not whole, as far as it could be fetched: {error}") from error
    return folder


def _download(model: str, files: Sequence[str]) -> Path:
    try:
        return Path(snapshot_download(model, allow_patterns=list(files)))
    except GatedRepoError as error:
        raise ModelError(
            f"The hub gives {model} only to users who accepted its terms: accept them on its page "
            f"and log in with `hf auth login`, or give a local folder."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{model} is no local path, and the hub has no such model (or it is private: "
            f"`hf auth login`). Check the spelling."
        ) from error
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise SourceError(
            f"{model} is no local path and not in the hub's cache, and could not be fetched "
            f"({reason}). Check the network, or give a local folder or .gguf file."
        ) from error
