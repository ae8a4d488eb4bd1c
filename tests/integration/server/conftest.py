"""Servers shared by the tests of a module: starting one takes longer than asking it."""

from collections.abc import Iterator

import pytest
from tests.served import Served, serving

from kv8.llm import LLM


@pytest.fixture(scope="module")
def served(tiny_model) -> Iterator[Served]:
    """A server of T4 with an FP8 cache, known as ``tiny``."""
    with serving(tiny_model(), kv_cache_dtype="fp8", served_model_name=["tiny", "t4"]) as server:
        yield server


@pytest.fixture(scope="module")
def llm(tiny_model) -> Iterator[LLM]:
    """The same model and cache without a server."""
    with LLM(tiny_model(), kv_cache_dtype="fp8", kv_cache_memory="2MiB") as offline:
        yield offline
