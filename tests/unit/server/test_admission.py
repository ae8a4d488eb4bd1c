"""How many sequences may be in work, and what those are told who find no room."""

import pytest

from kv8.server import admission as module
from kv8.server.admission import Admission
from kv8.server.refusals import QueueFullError, TooManySequencesError


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


def test_places_are_taken_and_given_back() -> None:
    places = Admission(max_num_seqs=2, max_queued=1)
    places.enter(1)
    places.enter(2)
    with pytest.raises(QueueFullError, match="3 of 3 sequences"):
        places.enter(1)
    places.leave(2)
    places.enter(2)
    assert places.num_sequences == 3
    assert places.num_refused == 1


def test_more_than_all_places_can_never_be_had() -> None:
    places = Admission(max_num_seqs=2, max_queued=0)
    with pytest.raises(TooManySequencesError, match="asks for 3 completions"):
        places.enter(3)
    assert places.num_sequences == 0


@pytest.mark.parametrize(("gap", "low", "high"), [(0.01, 1, 1), (4.0, 3, 5), (5000.0, 60, 60)])
def test_the_wait_is_about_how_long_places_take_to_become_free(clock, gap, low, high) -> None:
    places = Admission(max_num_seqs=4, max_queued=0)
    places.enter(2)
    for _ in range(40):
        places.enter(1)
        clock[0] += gap
        places.leave(1)
    places.enter(2)
    with pytest.raises(QueueFullError) as refused:
        places.enter(1)
    assert low <= refused.value.retry_after <= high


def test_a_quiet_night_says_nothing_of_how_fast_work_goes(clock) -> None:
    places = Admission(max_num_seqs=1, max_queued=0)
    for _ in range(5):
        places.enter(1)
        clock[0] += 0.5
        places.leave(1)
        clock[0] += 30_000
    places.enter(1)
    with pytest.raises(QueueFullError) as refused:
        places.enter(1)
    assert refused.value.retry_after == 1
