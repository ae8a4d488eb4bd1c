"""Ragged batches of any shape: attention depends on what is stored, not on how it came about."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention_backends import each_backend
from tests.attention_cases import (
    assert_exact_attention,
    fresh_pool,
    make_case,
    rounding_bound,
    run_chunks,
    run_step,
)

from kv8.attention.passes import MAX_WIDENED, split_batch, split_pass
from kv8.formats.base import FORMATS
from kv8.geometry import LayerGeometry

__all__ = ["each_backend"]  # every test here runs on every backend

FP8 = st.sampled_from(["fp8_e4m3", "fp8_e5m2"])


@st.composite
def cases(draw, max_length=40, formats=tuple(FORMATS)):
    stored_as = draw(st.sampled_from(formats))
    kv_heads = draw(st.integers(1, 3))
    return make_case(
        draw(st.lists(st.integers(1, max_length), min_size=1, max_size=4)),
        stored_as=stored_as,
        heads=(kv_heads * draw(st.integers(1, 3)), kv_heads),
        head_dim=draw(st.sampled_from([8, 32])),
        block_size=draw(st.sampled_from([1, 3, 16])),
        window=draw(st.none() | st.integers(1, max_length)),
        softcap=draw(st.none() | st.floats(0.5, 50)),
        sinks=draw(st.booleans()),
        fp8_queries=FORMATS[stored_as].quantized and draw(st.booleans()),
        spread=draw(st.sampled_from([1.0, 1000.0])),
        seed=draw(st.integers(0, 10**6)),
    )


@st.composite
def schedules(draw, case):
    """Split every sequence into chunks, and deal the chunks into steps in any interleaving."""
    chunks = []
    for s, queries in enumerate(case.queries):
        length = len(queries)
        cuts = draw(st.sets(st.integers(1, length - 1), max_size=4)) if length > 1 else set()
        chunks.append([(s, a, b) for a, b in pairwise([0, *sorted(cuts), length])])
    steps = []
    while any(chunks):
        ready = [s for s, rest in enumerate(chunks) if rest]
        chosen = draw(st.permutations(ready))[: draw(st.integers(1, len(ready)))]
        steps.append([chunks[s].pop(0) for s in chosen])
    return steps


@settings(max_examples=40)
@given(st.data())
def test_every_step_is_exact(data):
    case = data.draw(cases())
    for steps in data.draw(schedules(case)):
        assert_exact_attention(case, steps, run_step(case, steps))


@settings(max_examples=6)
@given(st.data())
def test_a_few_steps_are_exact(data):
    """The same, for a backend on which a step takes long (`attention_backends`)."""
    case = data.draw(cases(max_length=20))
    for steps in data.draw(schedules(case))[:3]:
        assert_exact_attention(case, steps, run_step(case, steps))


@settings(max_examples=40)
@given(st.data())
def test_chunks_and_company_change_nothing(data):
    """Pitfall 45: any schedule gives what each prompt alone and whole gives."""
    case = data.draw(cases())
    stepwise = run_chunks(case, data.draw(schedules(case)))
    for s, outputs in enumerate(stepwise):
        whole = [(s, 0, len(outputs))]
        alone = run_step(fresh_pool(case), whole)
        assert ((outputs - alone).abs() <= 2 * rounding_bound(case, whole)).all()


@settings(max_examples=30)
@given(st.data(), FP8)
def test_block_size_changes_nothing(data, stored_as):
    seed = data.draw(st.integers(0, 10**6))
    window = data.draw(st.none() | st.integers(1, 30))
    length = data.draw(st.integers(1, 50))
    outputs = []
    for block_size in (1, 16, 64):
        case = make_case([length], stored_as=stored_as, window=window, block_size=block_size)
        random = torch.Generator().manual_seed(seed)
        for tensor in (case.keys[0], case.values[0], case.queries[0]):
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        outputs.append(run_step(case, [(0, 0, length)]))
        bound = 2 * rounding_bound(case, [(0, 0, length)])
    assert ((outputs[1] - outputs[0]).abs() <= bound).all()
    assert ((outputs[2] - outputs[0]).abs() <= bound).all()


@given(st.data())
def test_passes_cover_every_row_and_head_once_and_stay_small(data):
    contexts = data.draw(st.lists(st.integers(1, 10**5), min_size=1, max_size=20))
    news = [data.draw(st.just(1) | st.integers(1, context)) for context in contexts]
    kv_heads, head_dim = data.draw(st.integers(1, 40)), data.draw(st.sampled_from([32, 64, 256]))
    window = data.draw(st.none() | st.integers(1, 5000))
    geometry = LayerGeometry(0, "full_attention", kv_heads, kv_heads, head_dim, window, 0)
    block_size = data.draw(st.sampled_from([1, 16, 64]))

    covered = set()
    for work in split_batch(geometry, news, contexts):
        heads = range(*work.kv_heads.indices(kv_heads))
        longest = max(r.num_tokens for r in work.visible)
        widened = len(work.sequences) * longest * len(heads) * head_dim
        assert widened <= MAX_WIDENED or (len(work.sequences) == len(heads) == 1)
        for s, visible in zip(work.sequences, work.visible, strict=True):
            assert news[s] == work.num_rows
            assert work.num_rows == 1 or len(work.sequences) == 1
            assert visible.end == contexts[s]
            cells = {(s, head) for head in heads}
            assert not covered & cells
            covered |= cells
        max_rows = max(1, work.num_rows // 3)
        tiles = list(split_pass(work, window, block_size, max_rows))
        rows = [row for tile in tiles for row in (tile.rows.start, tile.rows.stop)]
        assert rows[0] == 0
        assert rows[-1] == work.num_rows
        assert rows[1:-1:2] == rows[2:-1:2]
        if len(work.sequences) == 1:
            (visible,) = work.visible
            first = visible.start - visible.start % block_size
            for tile in tiles:
                last = first + tile.keys.stop - 1
                assert last == contexts[work.sequences[0]] - work.num_rows + tile.rows.stop - 1
                assert first <= first + tile.keys.start <= last
    assert covered == {(s, head) for s in range(len(contexts)) for head in range(kv_heads)}
