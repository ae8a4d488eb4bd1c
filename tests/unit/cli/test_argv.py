"""Flags as vLLM's users write them, before typer sees them."""

import pytest

from kv8.cli.argv import normalise
from kv8.errors import RequestError

SKIP = "--kv-cache-dtype-skip-layers"
FLAGS = {SKIP, "--kv-cache-dtype", "--json", "--stop"}


def words(text: str) -> list[str]:
    return normalise(text.split(), flags=FLAGS, lists={SKIP})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (f"inspect m {SKIP} 0 1 23", f"inspect m {SKIP}=0 {SKIP}=1 {SKIP}=23"),
        (f"inspect m {SKIP} 0 -1 --json", f"inspect m {SKIP}=0 {SKIP}=-1 --json"),
        (f"m {SKIP} -3-2,5 first:2 last:2", f"m {SKIP}=-3-2,5 {SKIP}=first:2 {SKIP}=last:2"),
        (f"m {SKIP} 0,3 {SKIP} 5", f"m {SKIP}=0,3 {SKIP}=5"),
        (f"{SKIP}=0 m", f"{SKIP}=0 m"),
        (f"{SKIP} 0 -- m p", f"{SKIP}=0 -- m p"),
        (f"{SKIP} sliding_window -v", f"{SKIP}=sliding_window -v"),
        ("--kv_cache_dtype fp8", "--kv-cache-dtype fp8"),
        ("--kv_cache_dtype=fp8_e5m2", "--kv-cache-dtype=fp8_e5m2"),
        ("--kv_cache_dtype_skip_layers 0 1", f"{SKIP}=0 {SKIP}=1"),
        ("--kv-cache-dtype_skip-layers 0", f"{SKIP}=0"),
        ("m a_b --other_flag -- --kv_cache_dtype", "m a_b --other_flag -- --kv_cache_dtype"),
        ("m --stop a_b", "m --stop a_b"),
    ],
)
def test_words(given: str, expected: str) -> None:
    assert words(given) == expected.split()


@pytest.mark.parametrize("given", [f"m {SKIP}", f"m {SKIP} --json", f"m {SKIP} -v"])
def test_a_list_flag_needs_a_value(given: str) -> None:
    with pytest.raises(RequestError, match="at least one value"):
        words(given)
