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

    _patch_language_once()
    return TritonBackend()


@cache
def _patch_language_once() -> None:
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


FACTORIES = {"reference": ReferenceBackend, "cpu": CpuBackend, "triton": triton_backend}


@pytest.fixture(scope="module", autouse=True, params=FACTORIES)
def each_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Make `run_step` and `new_backend` use one backend; gives its name.

    A module may say ``TOO_LONG_INTERPRETED = True``: Triton's interpreter takes milliseconds for
    what a GPU does in microseconds.
    """
    if request.param == "cpu":
        kernels_or_skip()
    if request.param == "triton" and getattr(request.module, "TOO_LONG_INTERPRETED", False):
        pytest.skip("too long for Triton's interpreter")
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
