"""A fingerprint of a model's weights: cheap, independent of how they are cut into files.

Scales belong to the weights they were measured with. Reading all weights to tell two models apart
would take longer than loading them; so every tensor counts by its name, type and shape, and by
a few bytes of its beginning, middle and end. Training moves nearly every number of the tensors
it touches, and every tensor is looked at; what escapes is an edit of single numbers.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from kv8.scales.header import read_header
from kv8.scales.names import resolve_name
from kv8.scales.tensors import weight_files

_SAMPLE_BYTES = 64


def weights_fingerprint(folder: Path) -> str:
    """Return 32 hex digits that differ between models with other weights; KV cache scales among
    the tensors do not count, nor does the split into files.

    Args:
        folder: a model folder.

    Raises:
        ModelError: a file is missing or damaged.
        ScaleError: a tensor's name looks like a KV cache scale and is none that kv8 knows.
    """
    digest = hashlib.blake2b(digest_size=16)
    for entry in sorted(entry for file in weight_files(folder) for entry in _tensors(file)):
        digest.update(b"\0".join(part.encode("utf-8", "surrogatepass") for part in entry[:2]))
        digest.update(entry[2])
    return digest.hexdigest()


def _tensors(file: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, type with shape, and sampled bytes of every weight in a safetensors file."""
    header = read_header(file)
    with file.open("rb") as opened:
        for name, stored in header.tensors.items():
            if resolve_name(name) is not None:
                continue
            sample = b""
            for position in _positions(stored.start, stored.end):
                opened.seek(position)
                sample += opened.read(min(_SAMPLE_BYTES, stored.end - position))
            yield name, f"{stored.dtype} {list(stored.shape)}", sample


def _positions(start: int, end: int) -> tuple[int, ...]:
    """Return where to sample the bytes from ``start`` to ``end``: first, middle, last."""
    last = max(start, end - _SAMPLE_BYTES)
    return (start, (start + last) // 2, last)
