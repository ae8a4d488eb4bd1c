"""Calibration text in local files: ``.txt`` and ``.jsonl``, read no further than needed."""

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from kv8.calibration.packing import Joints
from kv8.calibration.sources_rows import encode, record_tokens
from kv8.errors import RequestError

# Text is given to the tokenizer in pieces of this many bytes, cut between words: a cut can change
# a token or two, and whole files may be larger than memory.
_PIECE_BYTES = 1 << 20
_HEAD_BYTES = 1 << 16  # where a binary file shows itself


def read_text(path: Path, tokenizer: Any, joints: Joints) -> Iterator[Sequence[int]]:
    """Yield the tokens of a text file, which is one text, in pieces.

    Raises:
        RequestError: it cannot be read, is empty, binary, or not in UTF-8.
    """
    yield joints.begin
    rest = ""
    with _opened(path) as file:
        for text in _decoded(file, path):
            rest += text
            cut = 1 + max(rest.rfind("\n"), rest.rfind(" "))
            # Most tokenizers put a space with the word after it: cut before, not behind it.
            cut = cut - 1 if cut and rest[cut - 1] == " " else cut
            cut = cut or len(rest)
            yield encode(rest[:cut], tokenizer, str(path))
            rest = rest[cut:]
    yield encode(rest, tokenizer, str(path))
    yield joints.end


def read_jsonl(path: Path, tokenizer: Any, joints: Joints) -> Iterator[Sequence[int]]:
    """Yield the tokens of each line's text or conversation; blank lines are passed over.

    Raises:
        RequestError: the file cannot be read, is empty or binary, or a line is broken; the line's
            number is named.
    """
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield record_tokens(_parsed(line, where), tokenizer, joints, where)


def _opened(path: Path) -> IO[bytes]:
    """Open a file behind its byte order mark, having looked that it can be text."""
    if not path.is_file():
        raise RequestError(f"{path} is not a regular file; nothing else is read as text.")
    try:
        file = path.open("rb")
        head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error}.") from error
    if not head:
        raise RequestError(f"{path} is empty: there is nothing to calibrate on.")
    if b"\0" in head:
        raise RequestError(
            f"{path} is not text: it holds zero bytes, as binary files and UTF-16 do. Save it as "
            f"text in UTF-8."
        )
    file.seek(len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0)
    return file


def _decoded(file: IO[bytes], path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    while True:
        block = file.read(_PIECE_BYTES)
        start = file.tell() - len(block) - len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise RequestError(
                f"{path} is not text in UTF-8: {error.reason} at byte {start + error.start}. Save "
                f"it as UTF-8."
            ) from error
        if not block:
            return
        yield text


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode().strip())
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{where}: is not text in UTF-8 ({error.reason} at byte {error.start} of the line)."
        ) from error
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{where}: is not JSON ({error.msg.removesuffix(' at')} at column {error.colno}): "
            f"{line.decode().strip()!r:.60}. Mend or remove the line."
        ) from error
    except RecursionError:
        raise RequestError(f"{where}: is nested too deeply to be read.") from None
    except ValueError as error:  # what JSON allows and Python does not: a number of 5,000 digits
        raise RequestError(f"{where}: cannot be read ({error}). Mend or remove it.") from error
