"""Which samples scales are made from, in two halves, and which are kept to judge them by.

Decided by what a sample holds, never by where it stands: the same samples in another order fall
into the same parts. (Texts in another order are packed into other samples; see
`kv8.calibration.packing`.)
"""

import hashlib
import struct
from collections.abc import Sequence

from kv8.calibration.observations import Part


def split_samples(samples: Sequence[Sequence[int]], held_out: float) -> list[Part]:
    """Return the part of each sample.

    Args:
        samples: token numbers of each.
        held_out: share of the samples to keep apart, from 0 to less than 1. It is rounded down,
            but with 4 samples or more at least one is kept.
    """
    ranked = sorted(range(len(samples)), key=lambda i: _digest(samples[i]))
    num_held_out = int(held_out * len(samples))
    if held_out > 0 and len(samples) >= 4:
        num_held_out = max(num_held_out, 1)
    parts: list[Part] = ["held_out"] * len(samples)
    for rank, sample in enumerate(ranked[num_held_out:]):
        parts[sample] = "second" if rank % 2 else "first"
    return parts


def _digest(sample: Sequence[int]) -> bytes:
    return hashlib.blake2b(struct.pack(f"<{len(sample)}q", *sample), digest_size=16).digest()
