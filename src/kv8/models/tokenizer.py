"""Load a model's tokenizer from its folder, without any network."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kv8.errors import ModelError
from kv8.models.conversion_cache import PROVENANCE
from kv8.models.source import ModelSource, resolve_source
from kv8.models.source_hub import TOKENIZER_FILES, fetch_from_hub, is_hub_id

_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json",
)  # fmt: skip


def load_tokenizer(
    source: ModelSource, override: str | Path | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of ``source``, or the one that ``override`` names.

    Args:
        source: the model.
        override: a folder (weights are not needed there), or anything `resolve_source` takes.

    Raises:
        ModelError: there is none, or it cannot be read.
        SourceError: ``override`` could not be fetched.
    """
    folder = _override_folder(str(override)) if override else source.folder
    _check_vocabulary(folder)
    # For some model types AutoTokenizer replaces what tokenizer.json says by rules of its own;
    # a folder converted here says exactly what is meant.
    loader = PreTrainedTokenizerFast if (folder / PROVENANCE).exists() else AutoTokenizer
    try:
        return loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ModelError(
            f"The tokenizer in {folder} cannot be read: {reason}. Save it again, or name another "
            f"with --tokenizer."
        ) from error


def _override_folder(override: str) -> Path:
    path = Path(override).expanduser()
    if path.is_dir():
        return path
    if is_hub_id(override) and not path.exists():
        return fetch_from_hub(override, TOKENIZER_FILES, _check_vocabulary)
    try:
        return resolve_source(override).folder
    except ModelError as error:
        raise ModelError(f"tokenizer: {error}") from error


def _check_vocabulary(folder: Path) -> None:
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise ModelError(
            f"{folder} holds no tokenizer (none of {', '.join(_VOCABULARIES)}). Save it there "
            f"with the tokenizer's save_pretrained, or name another with --tokenizer."
        )
