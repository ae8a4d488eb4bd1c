"""The scheduler's rules one by one, over a real cache manager and no model."""

import pytest
from tests.unit.engine.scheduling import finish_all, make_request, make_scheduler, run_step

from kv8.engine.request import RequestState
from kv8.engine.scheduler import PROMPT_LOGITS_CHUNK
from kv8.errors import EngineError


def shares(chunks):
    return {chunk.request.request_id: chunk.num_tokens for chunk in chunks}


def test_prompts_are_cut_to_the_token_budget_in_order_of_arrival() -> None:
    scheduler, _ = make_scheduler(num_blocks=64, max_num_batched_tokens=10)
    scheduler.add(make_request("a", 0, 14))
    scheduler.add(make_request("b", 1, 5))
    assert shares(run_step(scheduler)) == {"a": 10}
    assert shares(run_step(scheduler)) == {"a": 4, "b": 5}


def test_decodes_come_before_prompts() -> None:
    scheduler, _ = make_scheduler(num_blocks=64, max_num_batched_tokens=8)
    scheduler.add(make_request("long", 0, 20, max_tokens=9))
    scheduler.add(make_request("short", 1, 2, max_tokens=9))
    assert shares(run_step(scheduler)) == {"long": 8}
    assert shares(run_step(scheduler)) == {"long": 8}
    assert shares(run_step(scheduler)) == {"long": 4, "short": 2}
    scheduler.add(make_request("later", 2, 30))
    assert shares(run_step(scheduler)) == {"long": 1, "short": 1, "later": 6}


def test_every_running_request_gets_a_token_however_small_the_budget() -> None:
    scheduler, _ = make_scheduler(num_blocks=64, max_num_batched_tokens=3, max_num_seqs=8)
    for i in range(6):
        scheduler.add(make_request(str(i), i, 1, max_tokens=50))
    for _ in range(5):
        assert shares(run_step(scheduler)) == {"0": 1, "1": 1, "2": 1}


def test_nobody_is_admitted_past_a_request_that_does_not_fit() -> None:
    scheduler, _ = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=64)
    scheduler.add(make_request("first", 0, 16, max_tokens=3))
    scheduler.add(make_request("big", 1, 24, max_tokens=1))
    scheduler.add(make_request("small", 2, 1, max_tokens=1))
    assert shares(run_step(scheduler)) == {"first": 16}
    order = [r.request_id for r in finish_all(scheduler)]
    assert order.index("big") < order.index("small") or order[0] == "first"
    assert scheduler.num_preemptions == 0


def test_the_newest_gives_up_its_blocks_and_keeps_its_tokens() -> None:
    scheduler, _ = make_scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=64)
    old = make_request("old", 0, 8, max_tokens=5)
    new = make_request("new", 1, 8, max_tokens=5)
    scheduler.add(old)
    scheduler.add(new)
    run_step(scheduler)
    tokens = list(new.token_ids)
    chunks = run_step(scheduler)  # both need a third block, none is left
    assert shares(chunks) == {"old": 1}
    assert new.state is RequestState.WAITING
    assert new.token_ids == tokens
    assert new.num_computed_tokens == 0
    assert scheduler.num_preemptions == new.num_preemptions == 1
    assert [r.request_id for r in finish_all(scheduler)] == ["old", "new"]


def test_two_sequences_that_fill_the_cache_exactly_never_preempt() -> None:
    scheduler, cache = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=64)
    for i in range(2):
        scheduler.add(make_request(str(i), i, 9, max_tokens=8))  # 16 stored tokens each
    finish_all(scheduler)
    assert scheduler.num_preemptions == 0
    assert cache.num_free_blocks == 8

    scheduler, _ = make_scheduler(num_blocks=8, block_size=4, max_num_batched_tokens=64)
    for i in range(2):
        scheduler.add(make_request(str(i), i, 9, max_tokens=9))  # one block more each
    finish_all(scheduler)
    assert scheduler.num_preemptions == 1


def test_a_follower_waits_for_its_leader_and_shares_the_prompt() -> None:
    scheduler, _ = make_scheduler(num_blocks=64, block_size=4, max_num_batched_tokens=8)
    leader = make_request("a0", 0, 16, max_tokens=3)
    follower = make_request("a1", 1, 16, prompt=0, leader=leader)
    scheduler.add(leader)
    scheduler.add(follower)
    assert shares(run_step(scheduler)) == {"a0": 8}
    assert shares(run_step(scheduler)) == {"a0": 8}
    assert shares(run_step(scheduler)) == {"a0": 1, "a1": 4}
    assert follower.num_cached_tokens == 12


def test_a_follower_goes_on_when_its_leader_is_aborted() -> None:
    scheduler, _ = make_scheduler(num_blocks=64, max_num_batched_tokens=4)
    leader = make_request("a0", 0, 16)
    scheduler.add(leader)
    scheduler.add(make_request("a1", 1, 16, prompt=0, leader=leader))
    run_step(scheduler)
    scheduler.finish(leader, "abort")
    assert shares(run_step(scheduler)) == {"a1": 4}


def test_prompt_logits_rule_out_the_prefix_cache_and_limit_the_chunk() -> None:
    scheduler, _ = make_scheduler(num_blocks=99, max_num_batched_tokens=600)
    scheduler.add(make_request("a", 0, 300))
    finish_all(scheduler)
    scheduler.add(make_request("b", 1, 300, prompt=0, wants_prompt_logits=True))
    assert shares(run_step(scheduler)) == {"b": PROMPT_LOGITS_CHUNK}


def test_abort_frees_blocks_and_wakes_a_blocked_queue() -> None:
    scheduler, cache = make_scheduler(num_blocks=4, block_size=4)
    first = make_request("first", 0, 12, max_tokens=5)
    scheduler.add(first)
    scheduler.add(make_request("second", 1, 12, max_tokens=5))
    assert shares(run_step(scheduler)) == {"first": 12}
    scheduler.finish(first, "abort")
    scheduler.finish(first, "abort")  # ending twice is harmless
    assert shares(run_step(scheduler)) == {"second": 12}
    cache.check_invariants()


def test_a_request_that_cannot_run_at_all_is_an_error_and_not_a_hang() -> None:
    scheduler, _ = make_scheduler(num_blocks=2, block_size=4)
    scheduler.add(make_request("a", 0, 9))
    with pytest.raises(EngineError, match="no room for the oldest"):
        scheduler.schedule()


def test_preempting_all_keeps_the_order() -> None:
    scheduler, cache = make_scheduler(num_blocks=64, max_num_batched_tokens=64)
    for i in range(3):
        scheduler.add(make_request(str(i), i, 4, max_tokens=4))
    run_step(scheduler)
    scheduler.preempt_all()
    assert [r.request_id for r in scheduler.waiting] == ["0", "1", "2"]
    assert cache.num_free_blocks == cache.num_blocks
    assert len(finish_all(scheduler)) == 3
