"""Where calibration text comes from: one name a user types, to samples of token numbers.

Texts are taken in the order they have, from the start, and only as far as the samples need them:
rows of a file beyond that are never read, so a fault in them is not found either.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kv8.calibration.packing import Joints, check_limits, digest, pack
from kv8.calibration.sources_datasets import is_dataset_id, read_dataset, read_folder
from kv8.calibration.sources_files import read_jsonl, read_text
from kv8.calibration.sources_made import WriteText, random_samples
from kv8.errors import EngineError, RequestError

RANDOM: Final = "random"
SELF: Final = "self"
ALLOWED: Final = (
    'Give a .txt file, a .jsonl file (objects with "text" or "messages", one a line), a folder or '
    "hub id of a dataset (with pip install 'kv8[datasets]'), random, or self."
)

_Reader = Callable[[Path, Any, Joints], Iterable[Sequence[int]]]
_READERS: Final[dict[str, _Reader]] = {".txt": read_text, ".jsonl": read_jsonl}


@dataclass(frozen=True)
class Samples:
    """What to calibrate on.

    Attributes:
        sequences: the samples, in order; none is empty or longer than ``max_length``.
        tokens_asked: tokens the user asked for: samples times their longest length.
        tokens_used: tokens there are.
        description: where they came from, for people.
        digest: 32 hex digits that differ whenever the samples differ.
    """

    sequences: tuple[tuple[int, ...], ...]
    tokens_asked: int
    tokens_used: int
    description: str
    digest: str


def load_samples(
    source: str | Path,
    tokenizer: Any,
    *,
    samples: int,
    max_length: int,
    seed: int,
    write_text: WriteText | None = None,
) -> Samples:
    """Return the samples that ``source`` names; texts are packed as `kv8.calibration.packing` says.

    Args:
        source: one of

            - a ``.txt`` file, in UTF-8: one text;
            - a ``.jsonl`` file: a text or a conversation a line;
            - a folder of data files, or one that ``save_to_disk`` wrote, or a hub id (``org/name``,
              ``org/name:config`` or ``org/name:config:split``), through the ``datasets`` library;
            - ``random``: random tokens, no special ones among them but a prompt's own beginning;
            - ``self``: text the model writes.

            A file or folder named like one of the last two is given as a path: ``./random``.
        tokenizer: the model's.
        samples: most samples.
        max_length: most tokens of a sample.
        seed: of what is drawn.
        write_text: what ``self`` calls; see `kv8.calibration.sources_made.text_writer`.

    Raises:
        RequestError: there is no such source, it is damaged, or it holds less than 16 tokens.
        SourceError: a dataset could not be fetched.
    """
    check_limits(samples, max_length)
    name, joints = str(source), Joints.of(tokenizer)
    if name == RANDOM:
        sequences = random_samples(tokenizer, joints, samples, max_length, seed=seed)
        description = f"random tokens, seed {seed}"
    elif name == SELF:
        if write_text is None:
            raise RequestError("The source self needs a model that can write; there is none here.")
        sequences = _checked(write_text(samples, max_length), samples, max_length)
        description = f"text the model wrote itself, seed {seed}"
    else:
        pieces, description = _read(name, tokenizer, joints)
        sequences = pack(pieces, joints, samples=samples, max_length=max_length, name=name)
    return Samples(
        sequences=sequences,
        tokens_asked=samples * max_length,
        tokens_used=sum(map(len, sequences)),
        description=description,
        digest=digest(sequences),
    )


def _read(name: str, tokenizer: Any, joints: Joints) -> tuple[Iterable[Sequence[int]], str]:
    if not name:
        raise RequestError(f"The source of the calibration data is missing. {ALLOWED}")
    path = Path(name).expanduser()
    suffix = path.suffix.lower()
    if path.is_dir():
        return read_folder(path, tokenizer, joints), f"dataset in {path}"
    folder, _, split = name.partition(":")
    if split and Path(folder).expanduser().is_dir():
        rows = read_folder(Path(folder).expanduser(), tokenizer, joints, split)
        return rows, f"dataset in {folder}, split {split}"
    if path.exists():
        if suffix not in _READERS:
            raise RequestError(
                f"{path} is no calibration text that can be read: its name ends in "
                f"{suffix or 'nothing known'}, not in {' or '.join(_READERS)}. {ALLOWED}"
            )
        return _READERS[suffix](path, tokenizer, joints), str(path)
    if suffix in _READERS:
        raise RequestError(f"{name} does not exist. {ALLOWED}")
    if is_dataset_id(name):
        return read_dataset(name, tokenizer, joints), f"dataset {name}"
    close = difflib.get_close_matches(name.lower(), (RANDOM, SELF), n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise RequestError(
        f"{name!r} is no local path, no hub id of a dataset (org/name), and not random or self."
        f"{hint} {ALLOWED}"
    )


def _checked(
    written: Sequence[Sequence[int]], samples: int, max_length: int
) -> tuple[tuple[int, ...], ...]:
    fits = len(written) == samples and all(1 <= len(text) <= max_length for text in written)
    if not fits:
        raise EngineError(
            f"The model was to write {samples} texts of at most {max_length} tokens; it wrote "
            f"{len(written)}, the longest of {max(map(len, written), default=0)}."
        )
    return tuple(map(tuple, written))
