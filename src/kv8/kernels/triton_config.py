"""How the Triton kernels are cut: tiles, warps, stages and parts, by shape, format and device.

Everything here is a rule of thumb or a measurement, and in no other place; a table of measured
choices for a device would be looked up here first. On one H200, decode over FP8 codes was
fastest with one warp, 32 keys a tile and 6 stages, and widening to float16 was both faster than FP8
products (3.54 against 3.33 TB/s) and more exact: one warp waits for memory and not for other
warps, and a multiprocessor holds several programs.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import torch

Casts = Literal["hardware", "bits", "interpreter"]

MAX_HEAD_DIM: Final = 512
MAX_GROUP: Final = 128  # query heads of one KV head
MAX_PARTS: Final = 128  # of one sequence in decode: one program merges them
_KIB: Final = 1024
# Shared memory one program may have, by compute capability; 99 KiB elsewhere.
_SHARED_KIB: Final = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}


@dataclass(frozen=True)
class Device:
    """What of a device matters here.

    Attributes:
        casts: see `kv8.kernels.triton_cast`.
        fp8_products: whether it multiplies FP8 matrices.
        num_multiprocessors: programs that run side by side, but for several on each.
        shared_bytes: the most shared memory one program may have.
        amd: whether Triton compiles for it as for AMD's.
    """

    casts: Casts
    fp8_products: bool
    num_multiprocessors: int
    shared_bytes: int
    amd: bool = False


INTERPRETER: Final = Device("interpreter", False, 4, 64 * _KIB)


def is_interpreted() -> bool:
    """Return whether Triton runs its kernels in Python, on tensors of any device."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def describe_device(index: int) -> Device:
    """Return the description of a CUDA (or ROCm) device."""
    properties = torch.cuda.get_device_properties(index)
    nvidia = torch.version.hip is None
    capability = (properties.major, properties.minor)
    casts = nvidia and capability >= (8, 9)
    known = _SHARED_KIB.get(capability, 99) if nvidia else 64
    return Device(
        casts="hardware" if casts else "bits",
        fp8_products=casts,
        num_multiprocessors=properties.multi_processor_count,
        # PyTorch before 2.6 does not say.
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", known * _KIB),
        amd=not nvidia,
    )


@dataclass(frozen=True)
class Shape:
    """What of a layer matters here.

    Attributes:
        num_kv_heads: K.
        group: J, query heads of one KV head.
        head_dim: D.
        code_bytes: bytes of a stored code.
        compute_bytes: bytes of a value in the products.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    code_bytes: int
    compute_bytes: int

    @property
    def padded_dim(self) -> int:
        """D as a power of two that a matrix unit takes (32 values for FP8)."""
        return max(32, power_of_two(self.head_dim))


@dataclass(frozen=True)
class DecodeConfig:
    """How decode is cut.

    Attributes:
        rows: query heads a program multiplies, padded.
        tile: keys it takes at once.
        parts: about how many parts a KV head's work is cut into, over all sequences; see
            `count_parts`.
        least: tiles of the smallest part.
        warps: of a program.
        stages: of its loop.
    """

    rows: int
    tile: int
    parts: int
    least: int
    warps: int
    stages: int

    def programs(self, num_sequences: int, max_context: int) -> int:
        """Return how many parts there are at most, whatever the lengths up to ``max_context``."""
        longest = max(1, min(MAX_PARTS, -(-max_context // self.tile) // self.least))
        return min(num_sequences * longest, self.parts + num_sequences - 1)


def count_parts(tiles: Sequence[int], parts: int, least: int) -> list[int]:
    """Return into how many parts each sequence's work is cut: the rule that the device follows.

    A part is a ``parts``-th of all tiles, or a little more; so a long sequence beside short ones
    gets most of the programs. A sequence shorter than that is one part.
    """
    size = max(-(-sum(tiles) // parts), least)
    return [min(max(n // size, 1), MAX_PARTS) for n in tiles]


@dataclass(frozen=True)
class PrefillConfig:
    """Rows and new tokens a program takes, keys a tile, warps, stages of its loop.

    ``fp8_values`` says whether FP8 weights meet the values as FP8 too. That has twice the rate, but
    the matrix unit wants values along the keys, so each byte of a tile has to be turned around: 32
    more stores a thread and tile of 64 keys. To be measured; widened values compute the same.
    """

    rows: int
    tokens: int
    tile: int
    warps: int
    stages: int
    fp8_values: bool = False


def decode_config(device: Device, shape: Shape) -> DecodeConfig:
    """Return how to decode batches of any size and length."""
    rows = max(16, power_of_two(shape.group))
    # A warp holds 16 x 128 sums in 64 registers a thread; wider heads and groups get more warps.
    warps = min(8, max(1, rows // 16 * shape.padded_dim // 128))
    # Stages are shared between looking up blocks and fetching them: of 6, two tiles are on the way.
    tile_bytes = 32 * shape.padded_dim * shape.code_bytes * 2
    stages = 6 if tile_bytes <= 32 * _KIB else 4
    if shape.compute_bytes == 4:
        warps, stages = max(4, warps), 4
    if device.amd:  # all but two stages are tiles in shared memory
        stages = max(2, min(stages, 2 + (device.shared_bytes - _KIB) // tile_bytes))
    # One program for each place on the device, so that all start at once. A part below 256 keys
    # costs more than it saves.
    places = min(8 // warps, device.shared_bytes // (2 * tile_bytes + 4 * _KIB))
    parts = max(1, max(1, places) * device.num_multiprocessors // shape.num_kv_heads)
    # The interpreter's time is a program's operations, whatever their size.
    tile = 32 if device.casts != "interpreter" else 64
    return DecodeConfig(rows, tile, parts, 256 // tile, warps, stages)


def prefill_config(device: Device, shape: Shape, *, fp8_products: bool) -> PrefillConfig:
    """Return how to compute prompts."""
    wide = shape.padded_dim > 128 or shape.compute_bytes == 4
    # Hopper has the shared memory for tiles of 128 keys: the sums are then rescaled half as often,
    # and what a tile costs beside its products counts less.
    roomy = device.shared_bytes > 200 * _KIB
    rows = max(64 if wide else 128, power_of_two(shape.group))
    # Elsewhere widened codes go through registers, of which there are too few for more.
    widens = shape.code_bytes != shape.compute_bytes
    tile = 32 if wide else 128 if roomy else 32 if widens else 64
    if device.casts == "interpreter":
        rows, tile = max(32, power_of_two(shape.group)), 64
    # Shared memory holds the query, the tiles on the way, and widened codes once more.
    query = rows * shape.padded_dim * (1 if fp8_products else shape.compute_bytes)
    values = 2 * tile * shape.padded_dim
    widened = values * shape.compute_bytes if widens else 0
    room = device.shared_bytes - query - widened - 8 * _KIB
    tiles = room // (values * shape.code_bytes)
    # Stages are shared between looking up blocks and fetching them: 3 keep two tiles, 5 three.
    stages = 5 if tiles >= 3 else 3 if tiles >= 2 else 1
    warps = 8 if rows >= 128 or shape.padded_dim > 128 else 4
    return PrefillConfig(rows, rows // shape.group, tile, warps, stages)


def store_rows(device: Device, shape: Shape) -> int:
    """Return how many rows (token, head) a program stores: about 4,096 values."""
    values = 4096 if device.casts != "interpreter" else 2**17
    return max(1, values // shape.padded_dim)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()
