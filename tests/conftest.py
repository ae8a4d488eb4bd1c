"""Fixtures every test may use: tiny models, and a guard that keeps tests off the network."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported anywhere: one thread a process, because pytest-xdist runs several, and a
# hub client that does not even try.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Likewise before triton: its kernels run in its interpreter, on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell lets what it starts in the background ignore ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "kv8", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kv8"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write generated pages and golden files anew"
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether to write golden files rather than compare with them."""
    return bool(request.config.getoption("--update-golden"))


def pytest_configure() -> None:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    library = os.environ.get("KV8_TEST_CPU_LIBRARY")  # `make sanitize` tests another build
    if library is not None:
        import kv8.kernels.cpu

        kv8.kernels.cpu.LIBRARY = Path(library)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return ``tiny_model(family="llama", **options) -> folder``, written once and then shared.

    Options are those of `tiny_models.save_model`. The folder is shared between tests: copy it
    before changing it.
    """
    written: dict[str, Path] = {}

    def folder_of(family: str = "llama", **options: Any) -> Path:
        from tests.tiny_models import save_model

        key = repr((family, sorted(options.items())))
        if key not in written:
            written[key] = save_model(tmp_path_factory.mktemp(family), family, **options)
        return written[key]

    return folder_of


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make any connection that leaves the machine fail, except in tests marked ``model``."""
    if request.node.get_closest_marker("model") is not None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
        yield


def _guarded(connect: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: socket.socket, address: Any) -> Any:
        inet = self.family in (socket.AF_INET, socket.AF_INET6)
        if inet and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise RuntimeError(f"a test tried to reach {address!r}; tests run without a network")
        return connect(self, address)

    return guarded
