"""Storing: the bytes are those of an independent encoder, in the slots and nowhere else."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from tests.attention_cases import (
    gather_rows,
    make_batch,
    make_case,
    new_backend,
    poisoned_pool,
    run_step,
    same_bits,
    visible_codes,
)
from tests.fp8_table import nearest_code

from kv8.attention.paged import PagedTokens, locate, write_tokens
from kv8.attention.passes import TokenRange
from kv8.formats.base import FORMATS
from kv8.formats.encode import bits, torch_dtype

STEPS = [(0, 0, 9), (1, 0, 20)]


def stored_bits(case, pool, s, position):
    block = case.tables[s][position // case.block_size]
    return bits(pool)[block, :, position % case.block_size]


def arena_bytes(pool):
    return torch.tensor(pool.untyped_storage().tolist(), dtype=torch.uint8)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("stored_as", ["fp8_e4m3", "fp8_e5m2"])
def test_stored_bytes_are_those_of_an_independent_encoder(stored_as, block_size):
    """Pitfall 30: the writer takes the format from the cache, at every block size."""
    case = make_case([9, 20], stored_as=stored_as, block_size=block_size, spread=50.0, head_dim=4)
    run_step(case, STEPS)
    layer = case.layer
    for pool, scale, tensors in (
        (layer.k_codes, layer.k_scale, case.keys),
        (layer.v_codes, layer.v_scale, case.values),
    ):
        for s, start, end in STEPS:
            for position in range(start, end):
                quotients = (tensors[s][position] / scale[:, None]).flatten().tolist()
                expected = [nearest_code(stored_as, Fraction(q), negative=q < 0) for q in quotients]
                assert stored_bits(case, pool, s, position).flatten().tolist() == expected


def test_the_two_fp8_formats_store_different_bytes_of_their_own_type():
    """Pitfall 70: e4m3 is stored when e4m3 is asked for, on this machine too, and e5m2 likewise."""
    cases = {name: make_case([9, 20], stored_as=name) for name in ("fp8_e4m3", "fp8_e5m2")}
    for case in cases.values():
        run_step(case, STEPS)
    e4m3, e5m2 = (case.layer.k_codes for case in cases.values())
    assert (e4m3.dtype, e5m2.dtype) == (torch.float8_e4m3fn, torch.float8_e5m2)
    for s, position in ((0, 0), (1, 19)):
        a, b = (stored_bits(case, case.layer.k_codes, s, position) for case in cases.values())
        assert (a != b).any()


@pytest.mark.parametrize("stored_as", FORMATS)
def test_nothing_but_the_slots_is_written(stored_as):
    case = make_case([9, 20], stored_as=stored_as, block_size=4)
    run_step(case, [(1, 0, 6)])
    pools = (case.layer.k_codes, case.layer.v_codes)
    before = [arena_bytes(pool) for pool in pools]
    run_step(case, [(1, 6, 8)])
    for pool, old in zip(pools, before, strict=True):
        new = arena_bytes(pool)
        slots = torch.zeros(len(old), dtype=torch.bool)
        for position in (6, 7):
            for head in range(pool.shape[1]):
                row = pool[case.tables[1][position // 4], head, position % 4]
                start = row.storage_offset() * row.element_size()
                slots[start : start + row.numel() * row.element_size()] = True
        assert torch.equal(new[~slots], old[~slots])
        assert (new[slots] != old[slots]).any()


def test_a_strided_pool_of_many_layers_keeps_every_value_apart():
    """Pitfall 34: views of one padded arena; each (layer, block, head) reads back its own."""
    num_layers, blocks, heads, size, dim, pad = 3, 5, 2, 4, 8, 24
    layer_bytes = 2 * heads * size * dim
    arena = torch.full((blocks, pad + num_layers * (layer_bytes + pad)), 0xAA, dtype=torch.uint8)
    case = make_case([size * blocks], block_size=size, head_dim=dim, heads=(4, heads))
    case = replace(case, tables=[[3, 0, 4, 1, 2]])
    layers = []
    for number in range(num_layers):
        start = pad + number * (layer_bytes + pad)
        k, v = (
            arena[:, at : at + layer_bytes // 2]
            .view(torch.float8_e4m3fn)
            .view(blocks, heads, size, dim)
            for at in (start, start + layer_bytes // 2)
        )
        scale = torch.tensor([0.25, 4.0]) * (number + 1)
        layers.append(
            replace(case.layer, k_codes=k, v_codes=v, k_scale=scale, v_scale=scale.flip(0) * 2)
        )
    written = {}
    for number, layer in enumerate(layers):
        at = replace(case, layer=layer, keys=[case.keys[0] * (number + 1)])
        run_step(at, [(0, 0, size * blocks)])
        written[number] = at
    for at in written.values():
        k, v = visible_codes(at, 0, size * blocks - 1)
        for stored, values, scale in (
            (k, at.keys[0], at.layer.k_scale),
            (v, at.values[0], at.layer.v_scale),
        ):
            step = torch.maximum(values.abs() * 2.0**-4, scale[:, None] * 2.0**-10)
            assert ((stored - values).abs() <= step).all()
    gaps = [slice(0, pad)] + [
        slice(pad + (n + 1) * (layer_bytes + pad) - pad, pad + (n + 1) * (layer_bytes + pad))
        for n in range(num_layers)
    ]
    assert all((arena[:, gap] == 0xAA).all() for gap in gaps)


@pytest.mark.parametrize("stored_as", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [0.25, 4.0])
def test_write_then_read_with_a_scale(stored_as, scale):
    """Pitfall 29: one meaning of the scale at both ends of the cache."""
    case = make_case([20], stored_as=stored_as)
    case.layer.k_scale.fill_(scale), case.layer.v_scale.fill_(1 / scale)
    run_step(case, [(0, 0, 20)])
    half_ulp = {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}[stored_as]
    for stored, values, side_scale in zip(
        visible_codes(case, 0, 19),
        (case.keys[0], case.values[0]),
        (scale, 1 / scale),
        strict=True,
    ):
        step = (values.abs() * half_ulp).clamp(min=case.layer.format.smallest / 2 * side_scale)
        assert ((stored - values).abs() <= step).all()


def test_every_code_is_copied_bit_for_bit():
    """Pitfall 36: blocks are moved as bits: all 256 codes, every NaN of a 16-bit type."""
    for stored_as in ("fp8_e4m3", "fp8_e5m2", "bfloat16", "float16"):
        kv_format = FORMATS[stored_as]
        pool = poisoned_pool(40, 2, 4, 8, stored_as)
        integers = torch.arange(128 * 16).view(128, 2, 8) * (37 if pool.element_size() > 1 else 1)
        codes = integers.to(bits(pool).dtype).view(torch_dtype(kv_format))
        slots = torch.randperm(160)[:128]
        write_tokens(pool, codes, slots)
        assert same_bits(pool[slots // 4, :, slots % 4], codes)
        read = PagedTokens((slots[:, None] // 4), torch.zeros(128, 4), None).read(pool)
        assert same_bits(read[torch.arange(128), :, slots % 4], codes)


def test_reading_zeroes_what_lies_outside_and_follows_no_other_entry():
    pool = poisoned_pool(6, 1, 4, 2, "fp8_e4m3")
    bits(pool)[[1, 4, 2]] = 9
    tables = torch.tensor([[99, 1, 4, -7], [2, 10**6, -1, -1]])
    tokens = locate(tables, [TokenRange(6, 10), TokenRange(0, 3)], 4)
    codes = bits(tokens.read(pool))[:, 0, :, 0]
    assert tokens.positions.tolist() == [[4, 5, 6, 7, 8, 9, 10, 11], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert codes.tolist() == [[0, 0, 9, 9, 9, 9, 0, 0], [9, 9, 9, 0, 0, 0, 0, 0]]


def test_counters_add_up_over_steps_and_sides():
    case = make_case([10], heads=(2, 1), head_dim=8)
    case.keys[0][2, 0, 0], case.keys[0][7, 0, 1] = 1e6, -torch.inf
    case.values[0][3, 0, :4] = 1e-20
    run_step(case, [(0, 0, 6)])
    assert case.layer.counters.k.tolist() == [48, 1, 0, 0]
    assert case.layer.counters.v.tolist() == [48, 0, 4, 0]
    run_step(case, [(0, 6, 10)])
    assert case.layer.counters.k.tolist() == [80, 2, 0, 0]
    assert case.layer.counters.v.tolist() == [80, 0, 4, 0]


def test_a_16_bit_cache_of_another_type_converts_and_counts():
    """Pitfall 32: bfloat16 keys in a float16 cache: values kept, what does not fit is counted."""
    case = make_case([8], stored_as="float16", dtype=torch.bfloat16)
    counters = make_case([8]).layer.counters
    case = replace(case, layer=replace(case.layer, counters=counters))
    case.keys[0][0, 0, 0] = 1e5
    run_step(case, [(0, 0, 8)])
    k, _ = visible_codes(case, 0, 7)
    assert k[0, 0, 0] == 65504.0
    assert torch.equal(k[1:], case.keys[0][1:].double())
    assert counters.k[:2].tolist() == [8 * 2 * 16, 1]


def test_storing_again_stores_the_same():
    case = make_case([20])
    run_step(case, [(0, 0, 20)])
    first = case.layer.k_codes.clone()
    new_backend().store(
        case.layer,
        gather_rows(case.keys, [(0, 0, 20)]),
        gather_rows(case.values, [(0, 0, 20)]),
        make_batch(case, [(0, 0, 20)]),
    )
    assert same_bits(case.layer.k_codes.clone(), first)
