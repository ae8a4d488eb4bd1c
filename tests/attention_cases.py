"""Builds one layer's cache and ragged batches for attention tests, and derives their tolerances."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kv8.attention.backend import AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerAttention, LayerCounters
from kv8.attention.reference import ReferenceBackend
from kv8.formats.encode import bits, torch_dtype
from kv8.formats.lookup import get_format
from kv8.geometry import LayerGeometry

UNIT_ROUNDOFF = 2.0**-24  # float32, round to nearest
NAN_BYTE = 0x7F  # NaN in e4m3 and e5m2; as int16 0x7F7F, NaN in bfloat16 and float16 too


@dataclass(frozen=True)
class Case:
    """A layer, the whole K, V and Q of some sequences, and who owns which blocks."""

    layer: LayerAttention
    call: AttentionCall
    block_size: int
    keys: list[torch.Tensor]  # a sequence: [L, K, D]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]  # a sequence: [L, H, D]
    tables: list[list[int]]


def make_case(
    lengths: Sequence[int],
    *,
    stored_as: str = "fp8_e4m3",
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    fp8_queries: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 1.0,
) -> Case:
    """Return a case with random data, its blocks shuffled, its cache full of NaN.

    ``spread`` is the ratio of the largest to the smallest per-head scale; each head's data has
    the magnitude its scale is made for, so that ``scales`` = (1, 1) fills the range well.
    """
    random = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    kv_format = get_format(stored_as)
    counts = [math.ceil(n / block_size) for n in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=random).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]

    def ladder(n: int, top: float) -> torch.Tensor:
        exponents = torch.linspace(0, 1, n) if n > 1 else torch.zeros(1)
        return (top * spread**-exponents).to(torch.float32)

    k_size, v_size = ladder(num_kv_heads, 1.0), ladder(num_kv_heads, 1.0).flip(0)
    per_kv = num_heads // num_kv_heads
    q_size = 1.0 / k_size.repeat_interleave(per_kv)  # logits stay of ordinary size

    def draw(n: int, size: torch.Tensor) -> torch.Tensor:
        shape = (n, len(size), head_dim)
        return (torch.randn(shape, generator=random) * size[:, None]).to(dtype)

    geometry = LayerGeometry(
        layer=0,
        type="full_attention" if window is None else "sliding_attention",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
        kv_source=0,
    )
    quantized = kv_format.quantized
    layer = LayerAttention(
        geometry=geometry,
        group=0,
        format=kv_format,
        k_codes=poisoned_pool(num_blocks, num_kv_heads, block_size, head_dim, stored_as),
        v_codes=poisoned_pool(num_blocks, num_kv_heads, block_size, head_dim, stored_as),
        k_scale=k_size / 64 * scales[0] if quantized else None,
        v_scale=v_size / 64 * scales[1] if quantized else None,
        q_scale=q_size / 64 if fp8_queries else None,
        counters=new_counters() if quantized else None,
    )
    call = AttentionCall(
        softmax_scale=head_dim**-0.5,
        softcap=softcap,
        sinks=torch.randn(num_heads, generator=random) if sinks else None,
        window=window,
    )
    return Case(
        layer=layer,
        call=call,
        block_size=block_size,
        keys=[draw(n, k_size) for n in lengths],
        values=[draw(n, v_size) for n in lengths],
        queries=[draw(n, q_size) for n in lengths],
        tables=tables,
    )


def new_counters() -> LayerCounters:
    return LayerCounters(torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))


def poisoned_pool(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, stored_as: str
) -> torch.Tensor:
    """Return codes [N, K, B, D], all NaN, page-major: other bytes lie between the blocks."""
    kv_format = get_format(stored_as)
    block_values = num_kv_heads * block_size * head_dim
    pad = 8
    arena = torch.full(
        (num_blocks, (2 * block_values + pad) * kv_format.bytes_per_value),
        NAN_BYTE if kv_format.bytes_per_value == 1 else 0xFF,
        dtype=torch.uint8,
    )
    codes = arena.view(torch_dtype(kv_format))[:, pad : pad + block_values]
    pool = codes.view(num_blocks, num_kv_heads, block_size, head_dim)
    assert pool.to(torch.float32).isnan().all()
    return pool


def make_batch(case: Case, steps: Sequence[tuple[int, int, int]]) -> AttentionBatch:
    """Return the batch in which sequence s computes positions start..end, for (s, start, end)."""
    width = max(len(table) for table in case.tables) + 2
    poison = 10**6  # an index error if it is ever followed
    table = torch.full((len(steps), width), poison, dtype=torch.int32)
    slots = []
    starts = [0]
    for row, (s, start, end) in enumerate(steps):
        first = 0 if case.call.window is None else max(0, start - case.call.window + 1)
        for column in range(first // case.block_size, math.ceil(end / case.block_size)):
            table[row, column] = case.tables[s][column]
        for position in range(start, end):
            block = case.tables[s][position // case.block_size]
            slots.append(block * case.block_size + position % case.block_size)
        starts.append(starts[-1] + end - start)
    return AttentionBatch(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([end for _, _, end in steps], dtype=torch.int32),
        block_tables=(table,),
        slots=(torch.tensor(slots, dtype=torch.int64),),
        block_size=case.block_size,
        query_lens_host=tuple(end - start for _, start, end in steps),
        context_lens_host=tuple(end for _, _, end in steps),
    )


def gather_rows(tensors: Sequence[torch.Tensor], steps: Sequence[tuple[int, int, int]]):
    return torch.cat([tensors[s][start:end] for s, start, end in steps])


def run_step(case: Case, steps: Sequence[tuple[int, int, int]], backend=None) -> torch.Tensor:
    """Store and attend one batch; return [T, H, D]."""
    backend = backend or ReferenceBackend()
    batch = make_batch(case, steps)
    backend.store(case.layer, gather_rows(case.keys, steps), gather_rows(case.values, steps), batch)
    return backend.attend(case.layer, gather_rows(case.queries, steps), batch, case.call)


def run_chunks(case: Case, chunks: Sequence[Sequence[tuple[int, int, int]]], backend=None):
    """Run several batches; return each sequence's output [L, H, D], poisoned where none came."""
    outputs = [torch.full_like(q, torch.nan) for q in case.queries]
    for steps in chunks:
        rows = run_step(case, steps, backend)
        at = 0
        for s, start, end in steps:
            outputs[s][start:end] = rows[at : at + end - start]
            at += end - start
    return outputs


def fresh_pool(case: Case, **changes) -> Case:
    """Return the same case over caches full of NaN."""
    n, k, b, d = case.layer.k_codes.shape
    name = case.layer.format.name
    layer = replace(
        case.layer,
        k_codes=poisoned_pool(n, k, b, d, name),
        v_codes=poisoned_pool(n, k, b, d, name),
        counters=new_counters() if case.layer.counters else None,
        **changes,
    )
    return replace(case, layer=layer)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
