"""Runs every test of a module once for each attention backend: import `each_backend` there."""

from collections.abc import Iterator

import pytest
from tests import attention_cases

from kv8.attention.cpu import CpuBackend
from kv8.attention.reference import ReferenceBackend
from kv8.kernels.cpu import CpuKernels, load_kernels

FACTORIES = {"reference": ReferenceBackend, "cpu": CpuBackend}


@pytest.fixture(scope="module", autouse=True, params=FACTORIES)
def each_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Make `run_step` and `new_backend` use one backend; gives its name."""
    if request.param == "cpu":
        kernels_or_skip()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_cases, "backend_factory", FACTORIES[request.param])
        yield request.param


def kernels_or_skip() -> CpuKernels:
    """Return the native kernels; skip the test where they were not built."""
    try:
        return load_kernels()
    except ImportError as error:
        pytest.skip(str(error))
