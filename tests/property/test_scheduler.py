"""Whatever arrives, in whatever order: every request ends, nobody starves, no block is lost."""

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.engine.scheduling import make_request, make_scheduler, run_step

from kv8.cache.capacity import longest_sequence


@st.composite
def workloads(draw):
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    windows = draw(st.sampled_from([(None,), (None, None), (None, 5), (7,), (3, None, 9)]))
    budget = draw(st.integers(1, 40))
    scheduler, cache = make_scheduler(
        num_blocks=draw(st.integers(4, 40)) * len(set(windows)),
        block_size=block_size,
        windows=windows,
        max_num_batched_tokens=budget,
        max_num_seqs=draw(st.integers(1, 8)),
        prefix_caching=draw(st.booleans()),
    )
    longest = longest_sequence(cache.layout, cache.num_blocks) or 200
    requests = []
    for sequence in range(draw(st.integers(1, 12))):
        total = draw(st.integers(2, max(2, longest)))
        if not cache.fits_alone(total):
            continue
        prompt_length = draw(st.integers(1, total - 1))
        shared = draw(st.sampled_from([None, 0, 7]))
        leader = draw(st.sampled_from([None, *requests]))
        requests.append(
            make_request(
                f"r{sequence}",
                sequence,
                prompt_length,
                max_tokens=total - prompt_length,
                prompt=shared,
                wants_prompt_logits=draw(st.booleans()),
                leader=leader,
            )
        )
    arrivals = sorted(draw(st.lists(st.integers(0, 30), min_size=12, max_size=12)))
    aborts = draw(st.dictionaries(st.integers(0, 11), st.integers(0, 40), max_size=3))
    return scheduler, cache, requests, arrivals, aborts


@given(workloads())
def test_every_request_ends_and_every_block_comes_back(workload) -> None:
    scheduler, cache, requests, arrivals, aborts = workload
    bound = 60 + 2 * sum(request.max_total_tokens for request in requests)
    aborted = set()
    for step in range(bound):
        for request, arrival in zip(requests, arrivals, strict=False):
            if arrival == step:
                scheduler.add(request)
            if aborts.get(request.sequence) == step and arrival <= step:
                scheduler.finish(request, "abort")
                aborted.add(request)
        if not scheduler.has_unfinished:
            if step > 30:
                break
            continue
        running = scheduler.running
        chunks = run_step(scheduler)
        assert chunks
        assert sum(chunk.num_tokens for chunk in chunks) <= scheduler._budget
        if running:  # the oldest is never disturbed
            assert chunks[0].request is running[0]
        served = {chunk.request for chunk in chunks}
        decoding = [r for r in scheduler.running if r.num_pending_tokens == 1 and r in running]
        assert all(request in served for request in decoding)
    assert all(request.finished for request in requests)
    for request in requests:
        if request not in aborted or request.finish_reason == "length":
            assert request.num_tokens == request.max_total_tokens
    assert cache.num_free_blocks == cache.num_blocks
    cache.check_invariants()


@given(
    long=st.integers(20, 60),
    gap=st.integers(1, 3),
    budget=st.integers(4, 16),
    seats=st.integers(2, 6),
)
def test_a_stream_of_short_requests_does_not_starve_a_long_one(long, gap, budget, seats) -> None:
    scheduler, _ = make_scheduler(
        num_blocks=24, block_size=4, max_num_batched_tokens=budget, max_num_seqs=seats
    )
    big = make_request("long", 50, long, max_tokens=10)
    sequence = 0
    for step in range(600):
        if step == 5:
            scheduler.add(big)
        if step % gap == 0:  # they never stop coming
            sequence += 50 if sequence == 49 else 1
            scheduler.add(make_request(f"s{sequence}", sequence, 6, max_tokens=3))
        run_step(scheduler)
        if big.finished:
            return
    raise AssertionError("the long request starved")


@given(budget=st.integers(4, 16), longs=st.integers(1, 4))
def test_long_requests_do_not_starve_a_short_one(budget, longs) -> None:
    scheduler, _ = make_scheduler(num_blocks=24, block_size=4, max_num_batched_tokens=budget)
    short = make_request("short", longs, 3, max_tokens=2)
    for sequence in range(longs):
        scheduler.add(make_request(f"l{sequence}", sequence, 60, max_tokens=20))
    scheduler.add(short)
    sequence = longs
    for _ in range(1000):
        sequence += 1
        if len(scheduler.waiting) < 3:  # and more long ones keep coming behind it
            scheduler.add(make_request(f"l{sequence}", sequence, 60, max_tokens=20))
        run_step(scheduler)
        if short.finished:
            return
    raise AssertionError("the short request starved")
