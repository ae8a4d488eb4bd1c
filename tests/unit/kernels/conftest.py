"""Each test of a native operation runs once for each build the CPU can run."""

from collections.abc import Iterator

import pytest
from tests.attention_backends import kernels_or_skip

from kv8.kernels.cpu import ISA_NAMES, CpuKernels


@pytest.fixture(params=range(len(ISA_NAMES)), ids=ISA_NAMES)
def kernels(request: pytest.FixtureRequest) -> Iterator[CpuKernels]:
    loaded = kernels_or_skip()
    before = loaded.isa
    if loaded.use_isa(request.param) != request.param:
        loaded.use_isa(before)
        pytest.skip("this CPU has no such instructions")
    yield loaded
    loaded.use_isa(before)
