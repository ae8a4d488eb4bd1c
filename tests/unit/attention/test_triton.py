"""What only the GPU kernels promise, in Triton's interpreter. docs/gpu_kernels.md: what it proves.

Exactness is test_reference.py's subject, which runs on these kernels too. Here: what a captured
graph needs, tiles and splits of more than one, casts, and queries outside float16's range.
"""

import math
from dataclasses import replace

import pytest
import torch
from tests.attention_backends import triton_backend
from tests.attention_cases import (
    TRITON_ARITHMETIC,
    assert_exact_attention,
    fresh_pool,
    gather_rows,
    make_batch,
    make_case,
    new_counters,
    run_step,
    same_bits,
)

from kv8.attention.naive import naive_attention
from kv8.attention.reference import ReferenceBackend
from kv8.cache.pool import allocate
from kv8.formats.base import FORMATS
from kv8.formats.encode import bits

LENGTHS = [140, 90, 30]  # tiles of 64 keys
MIXED = [(0, 60, 140), (1, 89, 90), (2, 10, 21)]
DECODE = [(0, 139, 140), (1, 89, 90), (2, 2, 3)]
FEATURES = {
    "plain": {},
    "window": {"window": 40},
    "softcap and sinks": {"softcap": 2.0, "sinks": True},
    "fp8 queries": {"fp8_queries": True},
}


@pytest.fixture(autouse=True)
def each_backend(monkeypatch):
    """These tests are about one backend."""
    monkeypatch.setattr("tests.attention_cases.arithmetic", TRITON_ARITHMETIC)


@pytest.fixture
def backend():
    return triton_backend()


def filled_case(backend, **options):
    """A case of which all keys and values are stored."""
    case = make_case(LENGTHS, heads=(3, 1), **options)
    steps = [(s, 0, length) for s, length in enumerate(LENGTHS)]
    backend.store(
        case.layer,
        gather_rows(case.keys, steps),
        gather_rows(case.values, steps),
        make_batch(case, steps),
    )
    return case


def attend(backend, case, steps, **changes):
    batch = replace(make_batch(case, steps), **changes)
    return backend.attend(case.layer, gather_rows(case.queries, steps), batch, case.call)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("block_size", [7, 64])
def test_several_tiles_are_exact(backend, features, block_size):
    case = filled_case(backend, block_size=block_size, **features)
    assert_exact_attention(case, MIXED, attend(backend, case, MIXED))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored_as", FORMATS)
def test_16_bit_queries_are_exact(backend, stored_as, dtype):
    """Products in float16, bfloat16 or float32, as the two types allow; heads of any size."""
    case = filled_case(backend, stored_as=stored_as, dtype=dtype, head_dim=20, window=60)
    steps = [(0, 130, 140), (1, 89, 90)]
    assert_exact_attention(case, steps, attend(backend, case, steps))


@pytest.fixture
def cut(monkeypatch):
    """Call it to let decode be cut into ``parts`` of tiles of 16 keys."""
    from kv8.kernels import triton_launch

    choose = triton_launch.decode_config

    def configure(parts, tile=16, least=1):
        monkeypatch.setattr(
            triton_launch,
            "decode_config",
            lambda *a: replace(choose(*a), tile=tile, parts=parts, least=least),
        )

    return configure


@pytest.mark.parametrize("parts", [1, 6, 40])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_parts_are_neutral(backend, features, parts, cut):
    """A long context is cut where short ones beside it are not."""
    cut(parts)
    case = filled_case(backend, **features)
    backend.reserve([case.layer], 3, 1000)
    backend._workspace.fill_(torch.nan)  # what was not written there is not read
    found = attend(backend, case, DECODE)
    assert_exact_attention(case, DECODE, found)
    assert same_bits(found, attend(backend, case, DECODE))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("parts", [1, 6, 13, 40])
def test_the_device_cuts_as_the_rule_says(backend, parts, window, cut):
    """What `count_parts` says of all lengths: so many partial results are written, no others. A
    sequence with several new tokens has no part in it, one of padding writes zeros.
    """
    from kv8.kernels.triton_config import count_parts, decode_config
    from kv8.kernels.triton_launch import workspace_values

    cut(parts)
    case = filled_case(backend, window=window)
    cache = backend._cache(case.layer)
    steps = [(0, 139, 140), (1, 50, 90), (2, 2, 3), (1, 89, 90), (0, 99, 100)]
    single = [n for _, first, n in steps if n - first == 1]
    tiles = [-(-n // 16) - (max(0, n - window) // 16 if window else 0) for n in single]
    counts = count_parts(tiles, parts, 1)
    query = torch.zeros(sum(n - a for _, a, n in steps), 3, 16)
    batch = make_batch(case, steps)
    bound = batch.block_tables[0].shape[1] * case.block_size
    needed = workspace_values(cache, query.dtype, len(steps), bound)
    backend._workspace = torch.full((needed,), torch.nan)
    attend(backend, case, steps)
    config = replace(decode_config(cache.device, cache.shape(query.dtype)), tile=16, least=1)
    programs = replace(config, parts=parts).programs(len(steps), bound)
    assert sum(counts) <= programs
    if max(counts) == 1:
        assert parts == 1
        assert backend._workspace.isnan().all()
        return
    aligned = -(-programs * 3 // 16) * 16
    totals = backend._workspace[aligned * 17 :][: programs * 3].view(programs, 3)
    written = [wide for count in counts for wide in [count > 1] * count]
    expected = torch.tensor(written + [False] * (programs - len(written)))
    assert torch.equal(~totals.isnan().any(1), expected)
    assert torch.equal(~totals.isnan().all(1), expected)


def test_only_the_device_needs_to_know_the_lengths(backend):
    """A captured step is played back with other lengths than the host had when it was captured."""
    case = filled_case(backend)
    known = attend(backend, case, DECODE)
    width = make_batch(case, DECODE).block_tables[0].shape[1] * case.block_size
    assert same_bits(attend(backend, case, DECODE, context_lens_host=(width,) * 3), known)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_rows_of_padding_store_nothing_and_give_zeros(backend, features):
    case = filled_case(backend, **features)
    batch = make_batch(case, DECODE)
    known = attend(backend, case, DECODE)
    padded = replace(
        batch,
        query_starts=torch.arange(6, dtype=torch.int32),
        context_lens=torch.cat([batch.context_lens, torch.zeros(2, dtype=torch.int32)]),
        block_tables=(
            torch.cat(
                [batch.block_tables[0], torch.full((2, batch.block_tables[0].shape[1]), -7).int()]
            ),
        ),
        slots=(torch.cat([batch.slots[0], torch.full((2,), -1)]),),
        query_lens_host=(1,) * 5,
        context_lens_host=(140,) * 5,
    )
    case = replace(case, layer=replace(case.layer, counters=new_counters()))
    pools = [bits(pool).clone() for pool in (case.layer.k_codes, case.layer.v_codes)]
    junk = torch.full((2, 1, 16), torch.nan)
    backend.store(
        case.layer,
        torch.cat([gather_rows(case.keys, DECODE), junk]),
        torch.cat([gather_rows(case.values, DECODE), junk]),
        padded,
    )
    for pool, before in zip((case.layer.k_codes, case.layer.v_codes), pools, strict=True):
        assert torch.equal(bits(pool), before)
    assert case.layer.counters.k.tolist() == [3 * 16, 0, 0, 0]
    query = torch.cat([gather_rows(case.queries, DECODE), torch.full((2, 3, 16), 3.0)])
    found = backend.attend(case.layer, query, padded, case.call)
    assert (found[3:] == 0).all()
    assert same_bits(found[:3], known)  # padding is no work, so all is cut as without it


def test_the_reserved_workspace_serves_every_smaller_batch(backend):
    case = filled_case(backend)
    backend.reserve([case.layer], 1, 512)
    first = backend._workspace.data_ptr()
    reserved = backend.reserve([case.layer], 8, 4096)
    assert backend._outgrown[0].data_ptr() == first  # a captured step may still write there
    address = backend._workspace.data_ptr()
    assert reserved == backend._workspace.nbytes
    for steps in (DECODE, DECODE[:1], [(1, p, p + 1) for p in range(80, 88)]):
        attend(backend, case, steps)
        assert backend._workspace.data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored_as", FORMATS)
def test_stored_bytes_and_counts_are_those_of_the_reference(backend, stored_as, dtype):
    """Infinities, NaN of either sign, subnormals, ties between codes."""
    case = make_case([32], stored_as=stored_as, heads=(2, 2), head_dim=64, dtype=dtype)
    values = hostile_values(dtype, 32 * 2 * 64).view(32, 2, 64)
    case.keys[0].copy_(values), case.values[0].copy_(values.flip(0))
    quantized = FORMATS[stored_as].quantized
    scales = {"k_scale": torch.tensor([1.0, 0.37]), "v_scale": torch.tensor([3.0, 2.0**-9])}
    found, expected = (
        replace(fresh_pool(case).layer, counters=new_counters(), **(scales if quantized else {}))
        for _ in range(2)
    )
    batch = make_batch(case, [(0, 0, 32)])
    backend.store(found, case.keys[0], case.values[0], batch)
    ReferenceBackend().store(expected, case.keys[0], case.values[0], batch)
    for a, b in ((found.k_codes, expected.k_codes), (found.v_codes, expected.v_codes)):
        a, b = a.float(), b.float()
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(7.0, posinf=1e39), b.nan_to_num(7.0, posinf=1e39))
    assert found.counters.k.tolist() == expected.counters.k.tolist()
    assert found.counters.v.tolist() == expected.counters.v.tolist()


def hostile_values(dtype, count):
    """FP8 codes and ties between them, their neighbours, and any bits."""
    codes = torch.arange(256, dtype=torch.uint8)
    near = [codes.view(t).to(torch.float32) for t in (torch.float8_e4m3fn, torch.float8_e5m2)]
    near = torch.cat([*near, *((a[:-1] + a[1:]) / 2 for a in near)])
    near = torch.cat([near, near.nextafter(torch.tensor(torch.inf)), near.nextafter(-near)])
    random = torch.Generator().manual_seed(3)
    patterns = torch.randint(-(2**31), 2**31, (count,), generator=random, dtype=torch.int64)
    values = patterns.to(torch.int32).view(torch.float32)
    values[: len(near)] = near
    return values.to(dtype)


@pytest.mark.parametrize("factor", [2.0**100, 2.0**-100])
def test_queries_outside_float16_are_brought_into_it(backend, factor):
    """Scales take the factor back: powers of two apart, the output is the same to the bit."""
    case = filled_case(backend, dtype=torch.bfloat16)
    steps = [(0, 138, 140), (1, 89, 90)]
    known = attend(backend, case, steps)
    layer = replace(case.layer, k_scale=case.layer.k_scale / factor)
    far = replace(case, layer=layer, queries=[q * factor for q in case.queries])
    assert same_bits(attend(backend, far, steps), known)
    assert known.isfinite().all()


def test_fp8_products_are_those_of_the_codes(backend, monkeypatch):
    """As on a GPU with FP8 matrix units, as far as the interpreter goes: it casts to FP8 wrongly
    where it has to round, so that here nothing has to: logits are whole powers of two.
    """
    from kv8.kernels import triton_launch
    from kv8.kernels.triton_config import Device

    monkeypatch.setattr("kv8.attention.triton.INTERPRETER", Device("hardware", True, 4, 2**16))
    case = make_case([100], heads=(3, 1), head_dim=32, fp8_queries=True)
    random = torch.Generator().manual_seed(1)
    for tensor, limit in ((case.keys[0], 3), (case.queries[0], 1), (case.values[0], 7)):
        tensor.copy_(torch.randint(-limit, limit + 1, tensor.shape, generator=random))
    case.queries[0][:, :, 2:] = 0  # logits up to 6
    for scale in (case.layer.k_scale, case.layer.v_scale, case.layer.q_scale):
        scale.fill_(0.5)
    case = replace(case, call=replace(case.call, softmax_scale=math.log(2)))
    steps = [(0, 0, 100)]
    expected = run_step(case, steps, ReferenceBackend())
    choose = triton_launch.prefill_config
    for fp8_values in (False, True):
        monkeypatch.setattr(
            triton_launch,
            "prefill_config",
            lambda *a, fp8_products, values=fp8_values: replace(
                choose(*a, fp8_products=fp8_products), fp8_values=values and fp8_products
            ),
        )
        found = run_step(fresh_pool(case), steps, backend)
        assert ((found - expected).abs() <= 100 * 2.0**-24 * 7).all()


def test_codes_at_odd_addresses_are_read_one_by_one(backend):
    """V is read as words of two codes where its blocks lie at even addresses, else as bytes."""
    case = filled_case(backend, block_size=16)
    known = attend(backend, case, DECODE)
    pool = case.layer.v_codes
    arena = torch.full((pool.shape[0], pool[0].numel() + 1), 0x7F, dtype=torch.uint8)
    odd = arena[:, 1:].view(torch.float8_e4m3fn).view(pool.shape)
    bits(odd).copy_(bits(pool))
    moved = replace(case, layer=replace(case.layer, v_codes=odd))
    assert same_bits(attend(backend, moved, DECODE), known)


def test_offsets_beyond_32_bits(backend):
    """Blocks that lie half a GiB apart, on pages that exist once they are written to."""
    case = make_case([40], heads=(2, 1), head_dim=32)
    steps, stride = [(0, 0, 40)], 2**29 + 2**12
    num_blocks = len(case.layer.k_codes)
    assert max(case.tables[0]) * stride > 2**31
    pools = []
    for _ in "kv":
        arena = allocate(num_blocks * stride, torch.device("cpu"))
        shape, strides = case.layer.k_codes.shape, case.layer.k_codes.stride()
        codes = arena.view(case.layer.k_codes.dtype).as_strided(shape, (stride, *strides[1:]))
        pools.append(codes)
    known = run_step(case, steps, backend)
    far = replace(case, layer=replace(case.layer, k_codes=pools[0], v_codes=pools[1]))
    assert same_bits(run_step(far, steps, backend), known)
    for codes, near in zip(pools, (case.layer.k_codes, case.layer.v_codes), strict=True):
        last = [(block, slice(None), slice(0, 8)) for block in case.tables[0]]
        assert all(torch.equal(bits(codes[at]), bits(near[at])) for at in last)
    decode = [(0, 39, 40)]
    assert same_bits(attend(backend, far, decode), attend(backend, case, decode))


@pytest.mark.parametrize("stored_as", ["fp8_e4m3", "fp8_e5m2"])
def test_every_code_is_widened_exactly(backend, stored_as):
    """By integer arithmetic, as on Ampere, which has no FP8 instructions. One key has all weight,
    so its value is the output; float16 holds every value of both formats.
    """
    case = make_case([2], stored_as=stored_as, heads=(1, 1), head_dim=256, dtype=torch.float16)
    case.layer.k_scale.fill_(1), case.layer.v_scale.fill_(1)
    bits(case.layer.k_codes).zero_()
    bits(case.layer.v_codes)[:] = torch.arange(256, dtype=torch.uint8)
    expected = torch.arange(256, dtype=torch.uint8).view(case.layer.v_codes.dtype).half()
    stored = ~expected.isinf()  # infinities of e5m2 are clamped away
    for steps in ([(0, 0, 1)], [(0, 0, 2)]):  # decode reads words of two codes, prompts bytes
        for found in attend(backend, case, steps):
            assert torch.equal(found[0].isnan()[stored], expected.isnan()[stored])
            assert torch.equal(found[0].nan_to_num(7)[stored], expected.nan_to_num(7)[stored])


@pytest.mark.parametrize("stored_as", ["fp8_e4m3", "bfloat16"])
def test_long_sums_keep_their_accuracy(backend, stored_as, cut):
    """Pitfall 43: as `test_error_does_not_grow_up_to_64k_keys`, in tiles large enough for the
    interpreter and merged from four parts. A matrix unit's own sums only a GPU shows.
    """
    u = 2.0**-24
    cut(parts=4, tile=2048)
    case = make_case([65536], heads=(2, 1), head_dim=32, stored_as=stored_as)
    case.values[0][:, :, ::2] = 3.0
    whole, last = [(0, 0, 65536)], [(0, 65535, 65536)]
    key, value = gather_rows(case.keys, whole), gather_rows(case.values, whole)
    ReferenceBackend().store(case.layer, key, value, make_batch(case, whole))
    query, step = gather_rows(case.queries, last), make_batch(case, last)
    found = backend.attend(case.layer, query, step, case.call)
    expected = naive_attention(case.layer, query, step, case.call)
    assert (found - expected).abs().max() / 3 <= 100 * u


def test_it_says_what_it_cannot_do(backend, monkeypatch):
    def refusal(**options):
        return backend.refuses(make_case([1], **options).layer)

    assert refusal() is None
    assert "head size 520 is more than 512" in refusal(head_dim=520)
    assert "129 query heads share a KV head" in refusal(heads=(129, 1))
    assert "this layer's is bfloat16" in refusal(stored_as="bfloat16", fp8_queries=True)
    monkeypatch.setattr("kv8.attention.triton.is_interpreted", lambda: False)
    assert refusal() == "its cache is on cpu"
    if not torch.cuda.is_available():
        with pytest.raises(ImportError, match="no GPU"):
            type(backend)()
