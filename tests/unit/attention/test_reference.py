"""The reference backend against the definition, over the same codes: float32 rounding apart.

Every cache here starts full of NaN, has other bytes between its blocks, and its block tables
point nowhere before a window: what is not finite in an output has read what it must not.
"""

from dataclasses import replace

import pytest
import torch
from tests.attention_cases import (
    assert_exact_attention,
    fresh_pool,
    make_batch,
    make_case,
    new_backend,
    rounding_bound,
    run_chunks,
    run_step,
)

from kv8.attention import passes, reference
from kv8.formats.base import FORMATS

FEATURES = {
    "plain": {},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "wide window": {"window": 1000},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "fp8 queries": {"fp8_queries": True},
    "all": {"window": 20, "softcap": 4.0, "sinks": True, "fp8_queries": True},
}
# Whole prompts; then, of the next step: a chunk, a decode, another prompt's start.
CONTEXTS = [(0, 0, 18), (1, 0, 16), (2, 0, 3)]
MIXED = [(2, 3, 33), (1, 16, 17), (3, 0, 7), (0, 18, 20)]
LENGTHS = [20, 17, 33, 7]


@pytest.mark.parametrize(
    ("stored_as", "feature"),
    [
        (stored_as, feature)
        for stored_as in FORMATS
        for feature, options in FEATURES.items()
        if FORMATS[stored_as].quantized or not options.get("fp8_queries")
    ],
)
def test_mixed_batches_in_every_format(stored_as, feature):
    """Pitfall 49: a later chunk over a quantized cache works, with every other feature on."""
    case = make_case(LENGTHS, stored_as=stored_as, block_size=4, **FEATURES[feature])
    assert_exact_attention(case, CONTEXTS, run_step(case, CONTEXTS))
    assert_exact_attention(case, MIXED, run_step(case, MIXED))


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 1), (8, 2), (9, 3)])
@pytest.mark.parametrize("head_dim", [32, 80, 256])
def test_head_counts_and_sizes(heads, head_dim):
    case = make_case([9, 6], heads=heads, head_dim=head_dim, sinks=True, spread=10.0)
    steps = [(0, 0, 9), (1, 0, 6)]
    assert_exact_attention(case, steps, run_step(case, steps))


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("window", [None, 16])
def test_no_step_at_block_or_window_edges(block_size, window):
    """Every position around an edge is as exact as every other, one token at a time."""
    case = make_case([66], block_size=block_size, window=window, heads=(2, 1))
    run_step(case, [(0, 0, 62)] if block_size == 64 else [(0, 0, 14)])
    for position in range(62, 66) if block_size == 64 else range(14, 34):
        steps = [(0, position, position + 1)]
        assert_exact_attention(case, steps, run_step(case, steps))


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_prompts_that_end_at_a_block_edge(offset):
    case = make_case([16 + offset], block_size=16)
    steps = [(0, 0, 16 + offset)]
    assert_exact_attention(case, steps, run_step(case, steps))


@pytest.mark.parametrize("path", ["prefill", "decode", "chunk", "mixed"])
@pytest.mark.parametrize("fp8_queries", [False, True])
def test_per_head_scales_reach_every_path(path, fp8_queries):
    """Pitfall 26: scales a thousandfold apart between heads, applied in prefill, decode, chunks."""
    case = make_case(LENGTHS, heads=(8, 4), spread=1000.0, fp8_queries=fp8_queries)
    first, then = {
        "prefill": ([], CONTEXTS),
        "decode": (CONTEXTS, [(0, 18, 19), (1, 16, 17), (2, 3, 4)]),
        "chunk": (CONTEXTS, [(2, 3, 33)]),
        "mixed": (CONTEXTS, MIXED),
    }[path]
    if first:
        run_step(case, first)
    assert_exact_attention(case, then, run_step(case, then))


def test_decoding_200_tokens_is_one_prefill_of_them():
    """Pitfall 28: one hand-off of scales for prefill and decode; the error has no trend."""
    case = make_case([200], spread=100.0, fp8_queries=True, heads=(2, 2))
    whole = run_step(case, [(0, 0, 200)])
    (stepwise,) = run_chunks(fresh_pool(case), [[(0, p, p + 1)] for p in range(200)])
    assert ((stepwise - whole).abs() <= 2 * rounding_bound(case, [(0, 0, 200)])).all()


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_how_work_is_cut_does_not_matter(features, monkeypatch):
    """Tiles of one row, heads one by one, a sequence a pass: the same to float32 rounding."""
    case = make_case(LENGTHS, block_size=4, **features)
    run_step(case, CONTEXTS)
    whole = run_step(case, MIXED)
    bound = 2 * rounding_bound(case, MIXED)
    monkeypatch.setattr(passes, "MAX_WIDENED", 1)
    assert ((run_step(case, MIXED) - whole).abs() <= bound).all()
    monkeypatch.setattr(reference, "_MAX_LOGITS", 1)
    assert ((run_step(case, MIXED) - whole).abs() <= bound).all()


@pytest.mark.parametrize("stored_as", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("chunk", [7, 64, 100])
@pytest.mark.parametrize("batch", [1, 3])
def test_prefix_hits_and_chunks(stored_as, chunk, batch):
    """Pitfalls 45, 49: attention sees stored codes, cold or warm, in chunks or whole, in company.

    A warm sequence's table points at the blocks that the cold one filled.
    """
    case = make_case([100] * batch, stored_as=stored_as, heads=(2, 1))
    for s in range(1, batch):
        case.keys[s], case.values[s] = case.keys[0], case.values[0]
        case.queries[s] = case.queries[0]
    cold = run_step(case, [(0, 0, 100)])
    bound = 2 * rounding_bound(case, [(0, 0, 100)])
    if batch == 1:
        case = fresh_pool(case)
    for s in range(1, batch):
        case.tables[s][:4] = case.tables[0][:4]  # 64 tokens
    start = 0 if batch == 1 else 64
    steps = [
        [(s, at, min(at + chunk, 100)) for s in range(batch)] for at in range(start, 100, chunk)
    ]
    for outputs in run_chunks(case, steps):
        assert ((outputs[start:] - cold[start:]).abs() <= bound[start:]).all()


def test_a_token_out_of_the_window_counts_for_nothing_and_one_inside_does():
    case = make_case([30], window=8, block_size=4)
    run_step(case, [(0, 0, 29)])
    before = run_step(case, [(0, 29, 30)])
    case.keys[0][:22], case.values[0][:22] = 3.0, -2.0
    run_step(case, [(0, 0, 29)])
    assert torch.equal(run_step(case, [(0, 29, 30)]), before)
    case.values[0][22] += 1.0
    run_step(case, [(0, 0, 29)])
    assert not torch.equal(run_step(case, [(0, 29, 30)]), before)


def test_sinks_take_weight_and_give_nothing():
    case = make_case([12], sinks=True)
    plain = run_step(replace(case, call=replace(case.call, sinks=None)), [(0, 0, 12)])
    case.call.sinks.fill_(-1e9)
    assert torch.equal(run_step(case, [(0, 0, 12)]), plain)
    case.call.sinks.fill_(1e4)
    assert (run_step(case, [(0, 0, 12)]) == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_output_has_the_query_s_shape_and_type(dtype):
    case = make_case([5, 3], dtype=dtype, head_dim=32)
    output = run_step(case, [(0, 0, 5), (1, 0, 3)])
    assert output.shape == (8, 4, 32)
    assert output.dtype == dtype
    assert output.isfinite().all()


def test_a_strided_query_is_read_as_it_is():
    case = make_case([6])
    steps = [(0, 0, 6)]
    expected = run_step(case, steps)
    query = torch.full((4, 6, 32), torch.nan)
    query[:, :, ::2] = case.queries[0].transpose(0, 1)
    strided = query[:, :, ::2].transpose(0, 1)
    found = new_backend().attend(case.layer, strided, make_batch(case, steps), case.call)
    assert torch.equal(found, expected)


class TestNaN:
    """A token stored as NaN is never hidden, and reaches exactly the queries that see it."""

    @pytest.mark.parametrize("side", ["keys", "values"])
    @pytest.mark.parametrize("window", [None, 6])
    @pytest.mark.parametrize("fp8_queries", [False, True])
    def test_it_reaches_those_who_see_it(self, side, window, fp8_queries):
        case = make_case([20, 9], window=window, block_size=4, fp8_queries=fp8_queries)
        steps = [(0, 0, 20), (1, 0, 9)]
        healthy = run_step(case, steps)
        getattr(case, side)[0][11, 0] = torch.nan
        broken = run_step(fresh_pool(case), steps)
        last = 20 if window is None else 11 + window
        sees = torch.zeros(29, 4, dtype=torch.bool)
        sees[11:last, :2] = True  # the two query heads of kv head 0
        assert broken[sees].isnan().all()
        bound = 2 * rounding_bound(case, [(1, 0, 9)]).max()
        assert ((broken - healthy)[~sees].abs() <= bound).all()

    def test_it_is_counted(self):
        case = make_case([4])
        case.keys[0][1, 0, :3] = torch.nan
        run_step(case, [(0, 0, 4)])
        assert case.layer.counters.k[3] == 3
        assert case.layer.counters.v[3] == 0


def test_values_come_from_the_value_cache():
    """Pitfall 33: K is noise, V is 3 everywhere, so attention is 3 within the format's error."""
    case = make_case(LENGTHS, scales=(1.0, 7.0))
    for values in case.values:
        values.fill_(3.0)
    for output in (run_step(case, CONTEXTS), run_step(case, MIXED)):
        assert ((output - 3).abs() <= 3 * 2.0**-4).all()
