"""What tests of fused models share."""

from typing import Any

import pytest

from kv8.kernels.step import OperationList


@pytest.fixture
def native_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of operations of each native call from now on."""
    lengths: list[int] = []
    own = OperationList.run

    def noted(self: OperationList, *arguments: Any) -> None:
        lengths.append(len(self.operations))
        own(self, *arguments)

    monkeypatch.setattr(OperationList, "run", noted)
    return lengths
