"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv8.errors import RequestError
from kv8.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 * 2**30),
        ("1.5 GB", 1_500_000_000),
        (" 512 mib ", 512 * 2**20),
        ("100", 100),
        ("7b", 7),
        (4096, 4096),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("bad", ["", "GiB", "2 Gigs", "-1GiB", "1e9", "0", 0, -5, 2.5, True, None])
def test_what_is_no_size_names_the_option(bad: object) -> None:
    with pytest.raises(RequestError, match="kv_cache_memory"):
        parse_bytes(bad, option="kv_cache_memory")  # type: ignore[arg-type]


@given(st.integers(1, 2**60))
def test_what_is_printed_reads_back_as_about_the_same(size: int) -> None:
    again = parse_bytes(format_bytes(size))
    assert abs(again - size) <= 0.006 * size  # two decimals of a number of at least 1


def test_format() -> None:
    assert format_bytes(512) == "512 B"
    assert format_bytes(3 * 2**29) == "1.50 GiB"
