"""Packs texts into samples without padding: which tokens become which sample.

The rule, which depends on nothing but the tokens and the two limits:

1. Texts are joined in their order into one stream, each between the model's own begin and end
   tokens: ``<begin> text <end> <begin> text <end> ...``, as far as the model has such tokens. Where
   a chat template wrote a text, the template wrote these too.
2. No more of the stream is taken than the samples can hold.
3. It is cut into as few samples as ``max_length`` allows, equal in length to within one token, so
   that no short rest is left; but into four where it has four blocks of tokens, since of fewer
   `kv8.calibration.parts` holds none out, and the report would have nothing to judge scales by.
4. A sample that starts inside a text gets the begin tokens in front, since every prompt has them.

Scales do not depend on the order of the samples made so. They do depend on the order of the texts:
a sample joins neighbours, so shuffled texts pack other samples; and texts behind the last sample
are never read.

Attention looks across the texts of a sample, as it does across the turns of a conversation.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from kv8.errors import RequestError

BLOCK_TOKENS: Final = 16  # the least to calibrate on, and the shortest max_length
_LEAST_SAMPLES: Final = 4


@dataclass(frozen=True)
class Joints:
    """The tokens a tokenizer puts around a text.

    Attributes:
        begin: what every prompt starts with; empty for models that have no such tokens.
        end: what the model writes when it has said all; empty where nothing is defined.
    """

    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> "Joints":
        """Return those of ``tokenizer``, by looking at what it makes of a text."""
        bare = tokenizer.encode("a", add_special_tokens=False)
        whole = tokenizer.encode("a")
        lead = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), len(whole))
        end = whole[lead + len(bare) :]
        if not end and isinstance(tokenizer.eos_token_id, int):
            end = [tokenizer.eos_token_id]
        return cls(tuple(whole[:lead]), tuple(end))


def check_limits(samples: int, max_length: int) -> None:
    """Raise `RequestError` unless there can be ``samples`` samples of ``max_length`` tokens."""
    for name, value, least in (("samples", samples, 1), ("max_length", max_length, BLOCK_TOKENS)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise RequestError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def pack(
    pieces: Iterable[Sequence[int]],
    joints: Joints,
    *,
    samples: int,
    max_length: int,
    name: str,
) -> tuple[tuple[int, ...], ...]:
    """Return at most ``samples`` samples of at most ``max_length`` tokens, by the rule above.

    Args:
        pieces: the stream, in pieces of any length, joints included; read only as far as needed.
        joints: the model's begin and end tokens.
        samples: most samples.
        max_length: most tokens of a sample.
        name: of the source, for the error.

    Raises:
        RequestError: the stream is shorter than one block of 16 tokens.
    """
    begin = joints.begin
    room = max(1, max_length - len(begin))
    stream: list[int] = []
    for piece in pieces:
        stream.extend(piece)
        if len(stream) >= max(samples * room, BLOCK_TOKENS):
            break
    if len(stream) < BLOCK_TOKENS:
        raise RequestError(
            f"{name} holds {len(stream)} tokens in all, which is less than one block of "
            f"{BLOCK_TOKENS}: nothing can be measured on so little. Give more text."
        )
    del stream[samples * room :]
    num = max(-(-len(stream) // room), min(_LEAST_SAMPLES, samples, len(stream) // BLOCK_TOKENS))
    cuts = [i * len(stream) // num for i in range(num + 1)]
    packed = []
    for start, stop in pairwise(cuts):
        sample = tuple(stream[start:stop])
        packed.append(sample if sample[: len(begin)] == begin else begin + sample)
    return tuple(packed)


def digest(sequences: Iterable[Sequence[int]]) -> str:
    """Return 32 hex digits that differ whenever a token, its place or a sample's length differs."""
    found = hashlib.blake2b(digest_size=16)
    for sequence in sequences:
        found.update(struct.pack(f"<I{len(sequence)}I", len(sequence), *sequence))
    return found.hexdigest()
