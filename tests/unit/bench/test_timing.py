"""Rounds, medians and ratios."""

import pytest

from kv8.bench.timing import Samples, in_turns, joined, speedup


def test_work_takes_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    seconds = in_turns(
        {name: lambda name=name: calls.append(name) for name in "ab"},
        3,
        each_round=lambda: calls.append("|"),
    )
    assert "".join(calls) == "ab|" * 4
    assert [len(samples.values) for samples in seconds.values()] == [3, 3]


def test_median_and_spread() -> None:
    samples = Samples((3.0, 9.0, 1.0))
    assert (samples.median, samples.least, samples.most) == (3.0, 1.0, 9.0)


def test_speedup_is_that_of_the_slowest() -> None:
    seconds = {"slow": Samples((4.0,)), "fast": Samples((1.0,)), "middling": Samples((2.0,))}
    assert speedup(seconds, "slow", "fast", "middling") == 2.0


def test_joined_adds_round_by_round() -> None:
    assert joined([Samples((1.0, 2.0)), Samples((10.0, 20.0))]).values == (11.0, 22.0)
    with pytest.raises(ValueError, match="zip"):
        joined([Samples((1.0,)), Samples((1.0, 2.0))])
