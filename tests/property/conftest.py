"""Attention's properties are tested on every backend, as far as time allows."""

import pytest
from tests.attention_backends import deselect_too_long


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect_too_long(config, items)
