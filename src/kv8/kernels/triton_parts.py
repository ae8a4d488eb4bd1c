"""Device code: how decode shares its programs among sequences of different lengths.

Only the device knows the lengths when a recorded step is played back, while the number of programs
is fixed. So every program works out for itself, from all lengths, whose part it is to take:
`kv8.kernels.triton_config.count_parts` is the rule. That is a few hundred cycles, about what one of
a hundred tiles takes.
"""

# Compiled by Triton, to its own rules of typing and naming.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def plan_parts(
    query_starts,  # int32 [S + 1]
    context_lens,  # int32 [S]
    num_sequences,
    parts,  # into how many parts a KV head's work is to be cut, about
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,  # tiles of the smallest part
    MOST: tl.constexpr,  # parts of a sequence
    PADDED_SEQUENCES: tl.constexpr,
):
    """Return int32 [PADDED_SEQUENCES], how many parts each sequence has, and where they end.

    Sequences of more than one new token have none, those without context one.
    """
    s = tl.arange(0, PADDED_SEQUENCES)
    known = s < num_sequences
    start = tl.load(query_starts + s, mask=known, other=0)
    single = known & (tl.load(query_starts + s + 1, mask=known, other=0) - start == 1)
    context = tl.load(context_lens + s, mask=single, other=0)
    tiles = (context + TILE - 1) // TILE - first_tile_of(context, WINDOW, TILE)
    size = tl.maximum((tl.sum(tiles, 0) + parts - 1) // parts, LEAST)
    count = tl.minimum(tl.maximum(tiles // size, 1), MOST)
    count = tl.where(single, count, 0)
    return count, tl.cumsum(count, 0)


@triton.jit
def first_tile_of(context, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Return the tile of the first key that a token at the end of ``context`` sees."""
    if WINDOW > 0:
        return tl.maximum(context - WINDOW, 0) // TILE
    else:
        return context * 0


@triton.jit
def find_part(count, end, program, num_sequences, PADDED_SEQUENCES: tl.constexpr):
    """Return the sequence a program works for (S if none), the number of its part, and of all."""
    before = (end <= program) & (tl.arange(0, PADDED_SEQUENCES) < num_sequences)
    s = tl.sum(before.to(tl.int32), 0)
    part = program - tl.max(tl.where(before, end, 0), 0)
    return s, part, tl.sum(tl.where(tl.arange(0, PADDED_SEQUENCES) == s, count, 0), 0)
