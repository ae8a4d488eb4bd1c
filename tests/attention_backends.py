"""Runs every test of a module once for each attention backend: import `each_backend` there."""

import importlib.util
import inspect
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from tests import attention_cases

from kv8.attention.backend import AttentionBackend
from kv8.attention.cpu import CpuBackend
from kv8.attention.reference import ReferenceBackend
from kv8.kernels.cpu import CpuKernels, load_kernels


def triton_backend() -> AttentionBackend:
    """Return the triton backend; skip the test where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    from kv8.attention.triton import TritonBackend

    patch_language_once()
    return TritonBackend()


@cache
def patch_language_once() -> None:
    """Let Triton's interpreter replace its language's functions once, not at every call.

    That took more than half of the tests' time.
    """
    from triton.runtime import interpreter

    replace, done = interpreter._patch_lang, set()

    def replace_once(function: Any) -> Any:
        modules = {id(m) for m in vars(interpreter.tl).values() if inspect.ismodule(m)}
        seen = frozenset(id(m) for m in function.__globals__.values() if id(m) in modules)
        seen |= {id(interpreter.tl)} & {id(m) for m in function.__globals__.values()}
        if seen not in done:
            done.add(seen)
            replace(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = replace_once


# Parts of names of tests that take Triton's interpreter too long: milliseconds go by there for what
# takes a GPU microseconds. What they are about is tested with less, here or in test_triton.py.
TOO_LONG_INTERPRETED = (
    "test_memory.py",
    "64k_keys",
    "test_decoding_200_tokens",
    "test_how_work_is_cut",
    "test_prefix_hits_and_chunks",
    "-naive-",
    "-reference-prefill",
    "-reference-chunk",
    "test_no_step_at_block_or_window_edges[triton-None-1]",
    "test_no_step_at_block_or_window_edges[triton-16-1]",
    "test_no_step_at_block_or_window_edges[triton-16-64]",
    "test_mixed_batches_in_every_format[triton-bfloat16",
    "test_mixed_batches_in_every_format[triton-float",
    "test_mixed_batches_in_every_format[triton-fp8_e5m2",
    "test_per_head_scales_reach_every_path[triton-False",
    "test_chunks_and_company",
    "test_block_size_changes_nothing",
    "test_every_step_is_exact",
)


def deselect_too_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take tests out of ``items`` that are too long on the triton backend, interpreted."""
    out = [
        item
        for item in items
        if "[triton" in item.nodeid and any(part in item.nodeid for part in TOO_LONG_INTERPRETED)
    ]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


FACTORIES = {"reference": ReferenceBackend, "cpu": CpuBackend, "triton": triton_backend}


@pytest.fixture(scope="module", autouse=True, params=FACTORIES)
def each_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Make `run_step` and `new_backend` use one backend; gives its name."""
    if request.param == "cpu":
        kernels_or_skip()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_cases, "backend_factory", FACTORIES[request.param])
        if request.param == "triton":
            patch.setattr(attention_cases, "arithmetic", attention_cases.TRITON_ARITHMETIC)
        yield request.param


def kernels_or_skip() -> CpuKernels:
    """Return the native kernels; skip the test where they were not built."""
    try:
        return load_kernels()
    except ImportError as error:
        pytest.skip(str(error))
