"""Runs every test of a module once for each attention backend: import `each_backend` there."""

import importlib.util
from collections.abc import Iterator

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

    return TritonBackend()


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
