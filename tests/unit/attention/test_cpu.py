"""What only the native kernels promise: bits that depend on nothing but the stored codes."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tests.attention_backends import kernels_or_skip
from tests.attention_cases import (
    assert_exact_attention,
    fresh_pool,
    gather_rows,
    make_batch,
    make_case,
    new_counters,
    run_chunks,
    run_step,
    same_bits,
)
from tests.native_operations import unusual

from kv8.attention.cpu import CpuBackend
from kv8.attention.reference import ReferenceBackend
from kv8.formats.base import FORMATS
from kv8.formats.encode import encode_counting
from kv8.kernels.cpu import ISA_NAMES
from kv8.kernels.openmp import openmp_runtimes

FEATURES = {
    "plain": {},
    "window": {"window": 130},
    "softcap and sinks": {"softcap": 2.0, "sinks": True},
    "fp8 queries": {"fp8_queries": True},
}
# Edges of the kernels' own tiles (64 keys) and splits (512 keys), and of blocks of 96 rows.
LENGTHS = [1, 63, 64, 65, 97, 511, 512, 513, 1100]


@pytest.fixture(autouse=True)
def each_backend():
    """These tests name their backend themselves."""


@pytest.fixture(params=range(len(ISA_NAMES)), ids=ISA_NAMES)
def backend(request):
    kernels = kernels_or_skip()
    best = kernels.isa
    if kernels.use_isa(request.param) != request.param:
        pytest.skip(f"this CPU has no {ISA_NAMES[request.param]}")
    yield CpuBackend(kernels)
    kernels.use_isa(best)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def whole_prompts(case):
    return [(s, 0, len(queries)) for s, queries in enumerate(case.queries)]


def builds():
    """Yield the name of every build this CPU runs, and a backend of it."""
    kernels = kernels_or_skip()
    best = kernels.isa
    try:
        for isa, name in enumerate(ISA_NAMES):
            if kernels.use_isa(isa) == isa:
                yield name, CpuBackend(kernels)
    finally:
        kernels.use_isa(best)


def assert_every_build_is_exact(case, *batches):
    """What is exact takes far longer to compute than all builds do, so it is computed once."""
    outputs, stored = {}, fresh_pool(case)
    for steps in batches:
        run_step(stored, steps, ReferenceBackend())
    for name, backend in builds():
        mine = fresh_pool(case)
        outputs[name] = [run_step(mine, steps, backend) for steps in batches]
        assert same_bits(mine.layer.k_codes.clone(), stored.layer.k_codes.clone()), name
        assert same_bits(mine.layer.v_codes.clone(), stored.layer.v_codes.clone()), name
    for steps, *found in zip(batches, *outputs.values(), strict=True):
        try:
            assert_exact_attention(stored, steps, torch.stack(found))
        except AssertionError:
            for name, one in zip(outputs, found, strict=True):
                print(f"{name}, {steps}:")
                assert_exact_attention(stored, steps, one)
            raise


@pytest.mark.parametrize("stored_as", FORMATS)
@pytest.mark.parametrize("head_dim", [4, 72, 128])
def test_every_build_is_exact(stored_as, head_dim):
    case = make_case(
        [70, 5], stored_as=stored_as, head_dim=head_dim, heads=(10, 2), block_size=5, sinks=True
    )
    assert_every_build_is_exact(case, [(0, 0, 66)], [(1, 0, 5), (0, 66, 70)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored_as", FORMATS)
@pytest.mark.parametrize("head_dim", [20, 64])
def test_every_build_is_exact_for_16_bit_queries(stored_as, head_dim, dtype):
    """Queries of 16 bits are multiplied as they are, weights as two bfloat16 numbers."""
    for heads in ((6, 2), (34, 2)):  # one block of rows, and more than a matrix unit takes at once
        case = make_case(
            [70, 33], stored_as=stored_as, head_dim=head_dim, heads=heads, window=50, dtype=dtype
        )
        batches = ([(0, 0, 66), (1, 0, 33)], [(0, 66, 67)], [(0, 67, 70)])
        assert_every_build_is_exact(case, *batches)


def test_infinite_values_and_nan_reach_only_rows_and_dimensions_they_belong_to(backend):
    """A bfloat16 cache stores them as they are; part of a weight may be zero or negative there."""
    case = make_case([90], stored_as="bfloat16", heads=(6, 2), head_dim=40, dtype=torch.bfloat16)
    case.values[0][40, 0, 3], case.values[0][70, 1, 5] = torch.inf, torch.nan
    whole = run_step(case, [(0, 0, 90)], backend)
    expected = run_step(fresh_pool(case), [(0, 0, 90)], ReferenceBackend())
    finite = torch.ones(90, 6, 40, dtype=torch.bool)
    finite[40:, :3, 3] = finite[70:, 3:, 5] = False
    assert torch.equal(whole.isfinite(), finite)
    assert (whole[40:, :3, 3] == torch.inf).all()
    finite &= expected.isfinite()
    # The output's own rounding, of values up to 5; the sums' is far below.
    assert ((whole - expected).abs()[finite] <= 5 * 2.0**-8).all()
    alone = torch.cat([run_step(case, [(0, i, i + 1)], backend) for i in range(90)])
    assert same_bits(alone.nan_to_num(7.0), whole.nan_to_num(7.0))


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_every_build_is_near_the_reference_across_splits(backend, features):
    """Both are within the float32 bound of exact attention, measured at a hundredth of it.

    Sums over 1100 keys of values up to 4 in magnitude differ by far less than 1100 · 2^-24 · 4.
    """
    case = make_case(LENGTHS, head_dim=32, heads=(3, 1), **features)
    steps = whole_prompts(case)
    found, expected = run_step(case, steps, backend), run_step(case, steps, ReferenceBackend())
    tolerance = 1100 * 2.0**-24 * 4
    if features.get("fp8_queries"):
        # A weight on a boundary of two codes may fall on either side: half a code's distance.
        tolerance = 2.0**-3 * 4
        assert (found - expected).abs().mean() <= 1100 * 2.0**-24 * 4
    assert ((found - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored_as", ["fp8_e4m3", "bfloat16"])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_chunks_decoding_and_company_change_no_bit(backend, stored_as, features, dtype):
    """Pitfall 45: any way to cut a prompt gives the same bits, single tokens included."""
    if features.get("fp8_queries") and stored_as == "bfloat16":
        pytest.skip("FP8 attention needs an FP8 cache")
    case = make_case(
        [700, 90], stored_as=stored_as, heads=(6, 2), block_size=7, dtype=dtype, **features
    )
    whole = run_chunks(case, [[(0, 0, 700)], [(1, 0, 90)]], backend)
    cuts = [0, 1, 64, 200, 201, 513, 699, 700]
    chunks = [[(0, a, b)] for a, b in pairwise(cuts)]
    chunks[2].append((1, 0, 33)), chunks[3].append((1, 33, 34)), chunks[4].append((1, 34, 90))
    cut = run_chunks(fresh_pool(case), chunks, backend)
    for a, b in zip(whole, cut, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_threads_change_no_bit(backend, features, two_threads):
    case = make_case(LENGTHS, heads=(6, 2), **features)
    steps = whole_prompts(case)
    last = [(s, end - 1, end) for s, _, end in steps]
    two = [run_step(case, steps, backend), run_step(case, last, backend)]
    torch.set_num_threads(1)
    one = [run_step(fresh := fresh_pool(case), steps, backend), run_step(fresh, last, backend)]
    for a, b in zip(two, one, strict=True):
        assert same_bits(a, b)
    assert same_bits(case.layer.k_codes.clone(), fresh.layer.k_codes.clone())


def hostile_values(dtype, count):
    """Every pattern of a 16-bit type, or random float32 bits with those near e4m3's and e5m2's."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)[:count]
    random = torch.Generator().manual_seed(3)
    patterns = torch.randint(-(2**31), 2**31, (count,), generator=random, dtype=torch.int64)
    values = patterns.to(torch.int32).view(torch.float32)
    codes = torch.arange(256, dtype=torch.uint8)
    near = [codes.view(t).to(torch.float32) for t in (torch.float8_e4m3fn, torch.float8_e5m2)]
    middle = [(a[:-1] + a[1:]) / 2 for a in near]
    near = torch.cat([*near, *middle])
    near = torch.cat([near, near.nextafter(torch.tensor(torch.inf)), near.nextafter(-near)])
    values[: len(near)] = near
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored_as", FORMATS)
def test_stored_bytes_and_counts_are_those_of_the_reference(backend, stored_as, dtype, two_threads):
    """Any pattern of bits: infinities, NaN of either sign, subnormals, ties between codes."""
    head_dim, tokens = 64, 512
    case = make_case([tokens], stored_as=stored_as, heads=(2, 2), head_dim=head_dim, dtype=dtype)
    values = hostile_values(dtype, tokens * 2 * head_dim).view(tokens, 2, head_dim)
    case.keys[0].copy_(values), case.values[0].copy_(values.flip(0))
    quantized = FORMATS[stored_as].quantized
    scales = {"k_scale": torch.tensor([1.0, 0.37]), "v_scale": torch.tensor([3.0, 2.0**-9])}
    found, expected = (
        replace(fresh_pool(case).layer, counters=new_counters(), **(scales if quantized else {}))
        for _ in range(2)
    )
    batch = make_batch(case, [(0, 0, tokens)])
    backend.store(found, case.keys[0], case.values[0], batch)
    ReferenceBackend().store(expected, case.keys[0], case.values[0], batch)
    for a, b in ((found.k_codes, expected.k_codes), (found.v_codes, expected.v_codes)):
        assert same_bits(without_nan_payload(a), without_nan_payload(b))
    assert found.counters.k.tolist() == expected.counters.k.tolist()
    assert found.counters.v.tolist() == expected.counters.v.tolist()


def without_nan_payload(codes):
    """A NaN is a NaN: processors differ in what they put into the rest of a 16-bit one."""
    codes = codes.clone()
    if codes.element_size() > 1:
        codes[codes.isnan()] = torch.nan
    return codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_views_into_larger_tensors_are_read_in_place(backend, dtype):
    """A model hands over slices of a fused projection: strides of tokens and of heads."""
    case = make_case([40], heads=(4, 2), head_dim=16, dtype=dtype)
    batch = make_batch(case, [(0, 0, 40)])
    expected = run_step(case, [(0, 0, 40)], backend)
    fused = torch.cat([case.queries[0], case.keys[0], case.values[0]], 1)  # [T, H + 2 K, D]
    query, key, value = fused.split([4, 2, 2], 1)
    layer = fresh_pool(case).layer
    backend.store(layer, key, value, batch)
    assert same_bits(backend.attend(layer, query, batch, case.call), expected)
    heads_first = fused.transpose(0, 1).contiguous().transpose(0, 1)
    query, key, value = heads_first.split([4, 2, 2], 1)
    backend.store(layer, key, value, batch)
    assert same_bits(backend.attend(layer, query, batch, case.call), expected)


def test_blocks_beyond_4_gib(backend):
    """Offsets are 64 bits wide: in bytes, in values, and in slots of one head."""
    case = make_case([20], heads=(1, 1), head_dim=64, block_size=16)
    expected = run_step(case, [(0, 0, 20)], backend)
    stride = 3 * 2**30  # memory that is never touched costs nothing
    arena = torch.empty(2 * stride + 4096, dtype=torch.uint8)
    pools = [
        arena[at:].view(torch.float8_e4m3fn).as_strided((3, 1, 16, 64), (stride, 1024, 64, 1))
        for at in (0, 2048)
    ]
    layer = replace(case.layer, k_codes=pools[0], v_codes=pools[1])
    far = replace(case, layer=layer, tables=[[2, 1]])
    assert same_bits(run_step(far, [(0, 0, 20)], backend), expected)


@pytest.mark.parametrize("entry", [-1, 10**6, -(2**31)])
def test_a_block_outside_the_cache_is_never_followed(backend, entry):
    case = make_case([40])
    run_step(case, [(0, 0, 40)], backend)
    batch = make_batch(case, [(0, 39, 40)])
    batch.block_tables[0][0, 1] = entry
    with pytest.raises(AssertionError, match="outside the cache"):
        backend.attend(case.layer, case.queries[0][39:], batch, case.call)


@pytest.mark.parametrize("slot", [-1, 10**9, -(2**62), 2**62])
def test_a_slot_outside_the_cache_is_never_written(backend, slot):
    case = make_case([40])
    steps = [(0, 0, 40)]
    batch = make_batch(case, steps)
    batch.slots[0][39] = slot
    before = case.layer.k_codes.clone()
    with pytest.raises(AssertionError, match="outside the cache"):
        backend.store(case.layer, gather_rows(case.keys, steps), case.values[0], batch)
    assert same_bits(case.layer.k_codes.clone(), before)


@pytest.mark.parametrize(("name", "value"), [("query_starts", 9), ("query_starts", 11),
                                             ("query_starts", 10**6), ("context_lens", 9),
                                             ("context_lens", 10**6)])  # fmt: skip
def test_lengths_that_do_not_fit_are_refused(backend, name, value):
    case = make_case([40])
    run_step(case, [(0, 0, 40)], backend)
    batch = make_batch(case, [(0, 30, 40)])
    getattr(batch, name)[-1] = value
    with pytest.raises(AssertionError, match="do not fit"):
        backend.attend(case.layer, case.queries[0][30:], batch, case.call)


@pytest.mark.parametrize("head_dim", [6, 516])
def test_head_sizes_it_cannot_serve_are_refused_with_the_reason(backend, head_dim):
    layer = make_case([1], head_dim=head_dim, stored_as="bfloat16").layer
    assert f"head size {head_dim}" in backend.refuses(layer)


def test_a_value_that_is_no_number_in_a_hidden_tail(backend):
    """Blocks are reused: what lies behind the last token may be any byte, NaN included."""
    case = make_case([30], block_size=64, head_dim=64)
    for pool in (case.layer.k_codes, case.layer.v_codes):
        assert pool.to(torch.float32).isnan().all()
    assert run_step(case, [(0, 0, 29)], backend).isfinite().all()
    assert run_step(case, [(0, 29, 30)], backend).isfinite().all()


def test_the_process_has_one_openmp_runtime():
    """Two would fight for the cores; the kernels are linked to none and use torch's."""
    kernels_or_skip()
    runtimes = openmp_runtimes()
    assert len(runtimes) <= 1, runtimes


# Powers of two, whose division is a multiplication, up to those whose inverse is subnormal; others.
SCALES = [1.0, 2.0**-7, 2.0**126, 2.0**127, 2.0**-126, 2.0**-140, 0.3, 1 / 448, 3e38]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored_as", ["fp8_e4m3", "fp8_e5m2"])
def test_any_scale_divides_as_torch_does(backend, stored_as, dtype):
    """Codes and counts of numbers that fit, of those that do not, and of what is no number."""
    case = make_case([40], stored_as=stored_as, heads=(4, 2), head_dim=32)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(40, 2, 32, generator=generator)
    values *= 2.0 ** torch.randint(-20, 20, values.shape, generator=generator)
    values[::5, :, :14] = unusual(dtype).float()
    for scale in SCALES:
        rows = (values * scale).to(dtype)
        layer = replace(fresh_pool(case).layer, counters=new_counters())
        layer.k_scale.fill_(scale), layer.v_scale.fill_(1.0)
        backend.store(layer, rows, rows, make_batch(case, [(0, 0, 40)]))
        for pool, counts, by in (
            (layer.k_codes, layer.counters.k, scale),
            (layer.v_codes, layer.counters.v, 1.0),
        ):
            codes, counted = encode_counting(rows, torch.tensor(by), case.layer.format)
            found = torch.stack([stored_row(case, pool, t) for t in range(40)])
            assert same_bits(found, codes)
            assert counts.tolist() == counted.tolist()


def stored_row(case, pool, position):
    block = case.tables[0][position // case.block_size]
    return pool[block, :, position % case.block_size]
