"""Builds one layer's cache and ragged batches for attention tests, and derives their tolerances."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kv8.attention.backend import AttentionBackend, AttentionCall
from kv8.attention.batch import AttentionBatch
from kv8.attention.layer import LayerAttention, LayerCounters
from kv8.attention.naive import naive_attention
from kv8.attention.reference import ReferenceBackend
from kv8.formats.base import FP8_E4M3
from kv8.formats.encode import bits, decode, encode, torch_dtype
from kv8.formats.lookup import get_format
from kv8.geometry import LayerGeometry

# What `new_backend` makes. tests/attention_backends.py runs a module once for each backend.
backend_factory: Callable[[], AttentionBackend] = ReferenceBackend


def new_backend() -> AttentionBackend:
    """Return the backend under test, the reference unless the module asks for more."""
    return backend_factory()


UNIT_ROUNDOFF = 2.0**-24  # float32, round to nearest


@dataclass(frozen=True)
class Arithmetic:
    """In what a backend may differ from exact attention, besides the rounding of float32 sums.

    Attributes:
        weight_roundoff: relative error of a weight as it meets the values, by the query's type.
        running_maximum: whether FP8 weights are rounded relative to the largest logit met so far.
    """

    weight_roundoff: dict[torch.dtype, float]
    running_maximum: bool


# One bfloat16 number (and its exponential has twice, in weight and sum, an error of 2^-13.7), or of
# what that leaves another one. The reference is more exact.
CPU_ARITHMETIC = Arithmetic(
    {torch.float32: 0.0, torch.bfloat16: 2.0**-8 + 2.0**-12.7, torch.float16: 2.0**-17}, False
)
# bfloat16 over a bfloat16 cache, float16 else.
TRITON_ARITHMETIC = Arithmetic(
    {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}, True
)
arithmetic = CPU_ARITHMETIC  # of `backend_factory`
HALF_STEPS = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
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
    backend = backend or new_backend()
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


def visible_codes(case: Case, s: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 [n, K, D] of K and V, scales applied, that ``position`` of sequence s sees."""
    layer = case.layer
    first = 0 if case.call.window is None else max(0, position - case.call.window + 1)
    at = torch.arange(first, position + 1)
    blocks = torch.tensor(case.tables[s])[at // case.block_size]
    sides = []
    for pool, scale in ((layer.k_codes, layer.k_scale), (layer.v_codes, layer.v_scale)):
        values = decode(pool[blocks, :, at % case.block_size], None, layer.format).double()
        sides.append(values if scale is None else values * scale.double()[:, None])
    return sides[0], sides[1]


def rounding_bound(case: Case, steps: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Return float64 [T, H, D]: how far float32 attention may lie from exact attention, same codes.

    A sum of n products in float32, in any order, is off by at most n·u·Σ|terms| (u = 2^-24). So
    a logit is off by (D + 8)·u·Σ|q·k| (8 for the scales and the exponent's own rounding); a weight
    by e to that, relatively; and the output by twice that (the row sum is off too) plus n·u, times
    Σ weight·|v|. With bfloat16 queries a weight may be rounded to bfloat16, 2^-8, after an
    exponential of 2^-13.7, which the row sum has too; with float16 ones it may be two bfloat16
    numbers: 2^-17 (backends differ: `Arithmetic`). In FP8 attention the weight's code may fall to
    the other side of a boundary: that step, where it is possible, is added. A weight below 2^-14
    is off by up to 2^-18, and with a running maximum by anything up to that, to either side.
    """
    rows = []
    heads_per_kv = case.layer.geometry.num_heads // case.layer.geometry.num_kv_heads
    for s, start, end in steps:
        for position in range(start, end):
            k, v = (
                side.repeat_interleave(heads_per_kv, 1).transpose(0, 1)
                for side in visible_codes(case, s, position)
            )  # [H, n, D]
            rows.append(_row_bound(case, case.queries[s][position], k, v))
    return torch.stack(rows)


def _row_bound(case: Case, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, layer, call = query.double(), case.layer, case.call
    if layer.q_scale is not None:
        scale = layer.q_scale[:, None]
        q = decode(encode(query, scale, FP8_E4M3), scale, FP8_E4M3).double()
    products = k * q[:, None] * call.softmax_scale
    logits, sizes = products.sum(-1), products.abs().sum(-1)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
        sizes = sizes + call.softcap
    sizes = sizes + logits.abs().amax(-1, keepdim=True) + 1
    logit_error = (k.shape[-1] + 8) * UNIT_ROUNDOFF * sizes.amax(-1, keepdim=True)
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    if call.sinks is not None:
        total = total + torch.exp(call.sinks.double()[:, None] - logits.amax(-1, keepdim=True))
    relative = 2 * torch.expm1(logit_error) + (k.shape[1] + 8) * UNIT_ROUNDOFF
    if layer.q_scale is None:
        relative = relative + arithmetic.weight_roundoff[query.dtype]
    bound = relative * (weights[:, None] @ v.abs())[:, 0] / total
    if layer.q_scale is not None:
        largest = (logits.amax(-1, keepdim=True) / math.log(2)).ceil() * math.log(2)
        weights = torch.exp(logits - largest)
        total = total * torch.exp(logits.amax(-1, keepdim=True) - largest)
        low, high = (
            decode(encode(weights * (1 + d), 2.0**-8, FP8_E4M3), 2.0**-8, FP8_E4M3).double()
            for d in (-relative, relative)
        )
        step = high - low
        if arithmetic.running_maximum:
            step = step + torch.where(weights < 2.0**-14, 2.0**-17, 0.0)
        bound = bound * (1 + 2.0**-4) + (step[:, None] @ v.abs())[:, 0] / total
    return bound


def assert_exact_attention(case: Case, steps: Sequence[tuple[int, int, int]], found: torch.Tensor):
    """Assert that ``found`` [T, H, D] is attention over the codes now stored, up to float32."""
    expected = naive_attention(
        case.layer, gather_rows(case.queries, steps), make_batch(case, steps), case.call
    )
    bound = rounding_bound(case, steps)
    assert bound.isfinite().all()
    half_step = HALF_STEPS[found.dtype]  # the output is rounded once, to the query's type
    bound = bound + half_step * (expected.abs() + bound)
    error = (found.double() - expected).abs()
    assert (error <= bound).all(), f"error {error.max():.3g}, {(error / bound).max():.3g} of bound"
