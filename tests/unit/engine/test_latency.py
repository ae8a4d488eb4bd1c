"""Times of requests: what is counted where, and what is not."""

import time

import pytest

from kv8.engine.counters import EngineCounters
from kv8.engine.latency import Histogram
from kv8.engine.request import Request


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Return the time, which passes only when a test changes it."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def request(arrived_at: float) -> Request:
    return Request(
        request_id="r",
        sequence=0,
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        max_tokens=8,
        arrived_at=arrived_at,
    )


def gain(counters: EngineCounters, one: Request) -> None:
    one.token_ids.append(7)
    counters.count_token(one)


def test_a_duration_on_a_bound_belongs_to_the_range_below() -> None:
    histogram = Histogram((0.1, 0.2))
    for seconds in (0.05, 0.1, 0.15, 0.2, 0.3):
        histogram.observe(seconds)
    assert histogram.counts == [2, 2, 1]
    assert histogram.count == 5
    assert histogram.total == pytest.approx(0.8)
    assert histogram.mean == pytest.approx(0.16)
    assert Histogram((1.0,)).mean is None


def test_the_first_token_is_counted_from_arrival_and_the_others_from_the_one_before(clock) -> None:
    counters, one = EngineCounters(), request(arrived_at=99.0)
    gain(counters, one)
    clock[0] = 100.25
    gain(counters, one)
    clock[0] = 100.75
    gain(counters, one)
    counters.count_finished(one, "length")
    times = counters.latencies
    assert (times.time_to_first_token.count, times.time_to_first_token.total) == (1, 1.0)
    assert (times.inter_token.count, times.inter_token.total) == (2, 0.75)
    assert (times.time_per_output_token.count, times.time_per_output_token.total) == (1, 0.375)
    assert (times.request.count, times.request.total) == (1, 1.75)
    assert (counters.prompt_tokens, counters.generated_tokens) == (3, 3)


def test_one_token_has_no_time_between_tokens(clock) -> None:
    counters, one = EngineCounters(), request(arrived_at=99.0)
    gain(counters, one)
    counters.count_finished(one, "stop")
    assert counters.latencies.time_per_output_token.count == 0
    assert counters.latencies.request.count == 1


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_what_was_broken_off_does_not_count_as_a_completed_request(clock, reason) -> None:
    counters, one = EngineCounters(), request(arrived_at=99.0)
    gain(counters, one)
    counters.count_finished(one, reason)
    assert counters.finished == {reason: 1}
    assert counters.latencies.request.count == 0
    assert counters.latencies.time_to_first_token.count == 1  # that token was waited for
