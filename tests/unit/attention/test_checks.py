"""A contract that is broken is reported before memory is touched."""

from dataclasses import replace

import pytest
import torch
from tests.attention_cases import gather_rows, make_batch, make_case

from kv8.attention.checks import check_attend, check_layer, check_store

STEPS = [(0, 0, 5), (1, 0, 3)]


@pytest.fixture
def case():
    return make_case([5, 3], fp8_queries=True)


def expect(pattern, function, *arguments):
    with pytest.raises(AssertionError, match=pattern):
        function(*arguments)


def test_a_sound_layer_and_step_pass(case):
    check_layer(case.layer)
    batch = make_batch(case, STEPS)
    key, value = gather_rows(case.keys, STEPS), gather_rows(case.values, STEPS)
    check_store(case.layer, key, value, batch)
    check_attend(case.layer, gather_rows(case.queries, STEPS), batch, case.call)


def test_k_and_v_in_one_place_are_reported(case):
    """Pitfall 33: a layer whose V is its K is no layer."""
    expect("V lies where K lies", check_layer, replace(case.layer, v_codes=case.layer.k_codes))


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("k_scale is None", {"k_scale": None}),
        ("v_scale is .*3", {"v_scale": torch.ones(3)}),
        ("k_scale is .*float64", {"k_scale": torch.ones(2, dtype=torch.float64)}),
        ("q_scale is .*2", {"q_scale": torch.ones(2)}),
        (
            "K codes are torch.float8_e5m2",
            {"k_codes": torch.zeros(9, 2, 16, 16).to(torch.float8_e5m2)},
        ),
        ("K .*V", {"v_codes": torch.zeros(9, 2, 16, 8).to(torch.float8_e4m3fn)}),
    ],
)
def test_scales_and_codes_fit_the_layer(case, pattern, changes):
    if "k_codes" in changes:
        changes = {**changes, "v_codes": changes["k_codes"].clone()}
    expect(pattern, check_layer, replace(case.layer, **changes))


def test_a_plain_layer_has_no_scales():
    layer = make_case([1], stored_as="bfloat16").layer
    check_layer(layer)
    expect("k_scale is", check_layer, replace(layer, k_scale=torch.ones(2)))


def test_blocks_must_be_contiguous(case):
    codes = torch.zeros(9, 16, 2, 16).to(torch.float8_e4m3fn).transpose(1, 2)
    layer = replace(case.layer, k_codes=codes, v_codes=codes.clone())
    expect("not contiguous", check_layer, layer)


@pytest.mark.parametrize(
    ("pattern", "key"),
    [
        (r"key is \(8, 2, 8\)", torch.zeros(8, 2, 8)),
        (r"key is \(7, 2, 16\)", torch.zeros(7, 2, 16)),
        ("key is torch.int64", torch.zeros(8, 2, 16, dtype=torch.int64)),
        ("key is on meta", torch.zeros(8, 2, 16, device="meta")),
    ],
)
def test_keys_fit_the_step(case, pattern, key):
    value, batch = gather_rows(case.values, STEPS), make_batch(case, STEPS)
    expect(pattern, check_store, case.layer, key, value, batch)


def test_a_layer_that_reads_another_s_cache_stores_nothing(case):
    geometry = replace(case.layer.geometry, layer=3, kv_source=1)
    key, value = gather_rows(case.keys, STEPS), gather_rows(case.values, STEPS)
    layer, batch = replace(case.layer, geometry=geometry), make_batch(case, STEPS)
    expect("layer 3 stores nothing", check_store, layer, key, value, batch)


def test_the_call_s_window_is_the_cache_s(case):
    """A wider one would read blocks that were given to somebody else."""
    query, batch = gather_rows(case.queries, STEPS), make_batch(case, STEPS)
    call = replace(case.call, window=7)
    expect("window 7 but its cache keeps window None", check_attend, case.layer, query, batch, call)


@pytest.mark.parametrize(
    ("pattern", "changes"),
    [
        ("block size 8, cache 16", {"block_size": 8}),
        ("different batches", {"context_lens_host": (5,)}),
        ("block table", {"block_tables": (torch.zeros(1, 4, dtype=torch.int32),)}),
        ("0 blocks for 5 tokens", {"block_tables": (torch.zeros(2, 0, dtype=torch.int32),)}),
        ("slots", {"slots": (torch.zeros(7, dtype=torch.int64),)}),
        ("5 new tokens in a context of 4", {"context_lens_host": (4, 3)}),
    ],
)
def test_the_batch_fits_itself_and_the_cache(case, pattern, changes):
    query, batch = gather_rows(case.queries, STEPS), make_batch(case, STEPS)
    expect(pattern, check_attend, case.layer, query, replace(batch, **changes), case.call)


def test_sinks_are_one_a_head(case):
    query, batch = gather_rows(case.queries, STEPS), make_batch(case, STEPS)
    call = replace(case.call, sinks=torch.zeros(2))
    expect("sinks are", check_attend, case.layer, query, batch, call)
