"""How threads wait is set before torch is loaded, and never against the user's wish."""

import os
import subprocess
import sys

import pytest

from kv8._waiting import wait_briefly


def test_threads_sleep_soon_by_default() -> None:
    environment: dict[str, str] = {}
    wait_briefly(environment)
    assert environment == {"GOMP_SPINCOUNT": "2000"}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_set_stays(name: str) -> None:
    environment = {name: "anything"}
    wait_briefly(environment)
    assert environment == {name: "anything"}


def test_importing_kv8_sets_it_before_the_runtime_is_loaded() -> None:
    code = (
        "import kv8, os, sys; assert 'torch' not in sys.modules; "
        "print(os.environ['GOMP_SPINCOUNT'])"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "2000"
