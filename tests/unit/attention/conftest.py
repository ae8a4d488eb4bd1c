"""Backend tests run on every backend."""

import pytest
from tests.attention_backends import deselect_too_long, each_backend

__all__ = ["each_backend"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect_too_long(config, items)
