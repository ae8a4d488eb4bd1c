"""Made-up attention work, to measure kernels on: blocks full of random codes, ragged batches."""

from collections.abc import Sequence
from typing import Final

import torch

from kv8.attention.batch import AttentionBatch
from kv8.cache.pool import allocate
from kv8.formats.base import KVFormat
from kv8.formats.encode import bits, encode, torch_dtype

CODE_SCALE: Final = 1 / 64  # the scale under which codes mean values of a normal distribution
_DISTINCT_BLOCKS: Final = 64  # as many are random; the rest are copies, at other addresses


def random_codes(
    kv_format: KVFormat,
    shape: tuple[int, int, int, int],
    device: torch.device,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V codes, each [N, K, B, D] of ``shape``, which lie as in a cache.

    Raises:
        CapacityError: the memory cannot be had.
    """
    num_blocks, *block = shape
    some = (min(_DISTINCT_BLOCKS, num_blocks), 2, *block)
    values = torch.randn(some, device=device, generator=generator)
    drawn = (
        encode(values, CODE_SCALE, kv_format)
        if kv_format.quantized
        else values.to(torch_dtype(kv_format))
    )
    repeated = bits(drawn).repeat(-(-num_blocks // len(drawn)), 1, 1, 1, 1)[:num_blocks]
    codes = allocate(repeated.nbytes, device).view(repeated.dtype)
    codes = codes.view(repeated.shape).copy_(repeated).view(torch_dtype(kv_format))
    return codes[:, 0], codes[:, 1]


def made_up_batch(
    lengths: Sequence[tuple[int, int]],
    block_size: int,
    device: torch.device,
    *,
    recorded: bool = False,
) -> AttentionBatch:
    """Return a batch of sequences of ``(new tokens, context)``, whose blocks lie in random order.

    ``recorded``: as a step that is to be played back has it.
    """
    widths = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(8))
    parts = torch.split_with_sizes(order, widths)
    table = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
    slots, starts = [], [0]
    for row, ((new, context), blocks) in enumerate(zip(lengths, parts, strict=True)):
        table[row, : len(blocks)] = blocks
        at = torch.arange(context - new, context)
        slots.append(blocks[at // block_size] * block_size + at % block_size)
        starts.append(starts[-1] + new)
    return AttentionBatch(
        query_starts=torch.tensor(starts, dtype=torch.int32).to(device),
        context_lens=torch.tensor([c for _, c in lengths], dtype=torch.int32).to(device),
        block_tables=(table.to(device),),
        slots=(torch.cat(slots).to(device),),
        block_size=block_size,
        query_lens_host=tuple(new for new, _ in lengths),
        context_lens_host=tuple(context for _, context in lengths),
        lengths_on_device=recorded,
    )
