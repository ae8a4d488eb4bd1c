"""Progress that survives an interruption: exact, checked, and never mistaken for another's."""

import errno
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from tests.observing import same

from kv8.calibration.interrupts import Terminated, held_interrupts, raised_interrupts
from kv8.calibration.observations import Observations
from kv8.calibration.partial import PartialResult
from kv8.calibration.partial_facts import Facts
from kv8.errors import RequestError

FACTS = Facts.of(
    {"dtype": "float32", "data": "12ab"},
    {"data": {"data": "a.txt", "samples": 48, "max_length": 60}},
)
SAMPLES = ((1, 2, 3), (4,), (5, 6))


def seen() -> Observations:
    observations = Observations("float32")
    for side in ("q", "k", "v"):
        observations.observe("first", 0, side, torch.randn(4, 2, 16), [0, 1], [3, 1])  # type: ignore[arg-type]
    observations.count("first", 4, 2)
    return observations


def test_it_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    observations = seen()
    fresh = PartialResult(tmp_path / "out", FACTS)
    assert (fresh.num_done, fresh.samples, fresh.observations) == (0, None, None)
    fresh.save(SAMPLES, observations, 2)
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    again = PartialResult(tmp_path / "out", FACTS)
    assert (again.num_done, again.samples) == (2, SAMPLES)
    assert again.observations is not None
    assert same(again.observations, observations)
    again.remove()
    again.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("decisive", "options", "told"),
    [
        ({"dtype": "bfloat16"}, {}, "dtype was float32, is bfloat16"),
        ({"data": "34cd"}, {"samples": 40}, "samples was 48, is 40"),
        (
            {"data": "34cd"},
            {"data": "b.txt", "max_length": 50},
            "data was a.txt, is b.txt; max_length was 60, is 50",
        ),
        ({"data": "34cd"}, {}, r"the content of data \(a\.txt\) has changed"),
        ({"seed": 1}, {}, "seed was not there, is 1"),
    ],
)
def test_another_calibrations_progress_is_refused_naming_the_differences(
    tmp_path: Path, decisive: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    PartialResult(tmp_path / "out", FACTS).save(SAMPLES, seen(), 2)
    other = Facts.of(FACTS.decisive | decisive, {"data": FACTS.options["data"] | options})
    with pytest.raises(
        RequestError, match=rf"another calibration: {told}\. .*Remove .*\.out\.partial"
    ):
        PartialResult(tmp_path / "out", other)
    assert (tmp_path / ".out.partial").exists()
    PartialResult(tmp_path / "other", other)


def test_what_a_process_killed_while_saving_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "..out.partial.writing-1.tmp").write_bytes(b"half of it")
    (tmp_path / "..other.partial.writing-1.tmp").write_bytes(b"somebody else's")
    PartialResult(tmp_path / "out", FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["..other.partial.writing-1.tmp"]


def test_the_same_content_by_another_name_is_the_same(tmp_path: Path) -> None:
    PartialResult(tmp_path / "out", FACTS).save(SAMPLES, seen(), 2)
    renamed = Facts.of(FACTS.decisive, {"data": FACTS.options["data"] | {"data": "b.txt"}})
    assert PartialResult(tmp_path / "out", renamed).num_done == 2


@pytest.mark.parametrize("content", [b"", b"not safetensors", None])
def test_a_damaged_file_is_refused_with_a_way_out(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / ".out.partial"
    PartialResult(tmp_path / "out", FACTS).save(SAMPLES, seen(), 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if content is None else content)
    with pytest.raises(RequestError, match=r"Remove .* to start over"):
        PartialResult(tmp_path / "out", FACTS)


def test_a_full_disk_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    assert not PartialResult(tmp_path / "out", FACTS).save(SAMPLES, seen(), 2)
    told = (
        r"saved beside .*out: \.out\.partial takes .* KiB: No space left on device \(.* are free\)"
    )
    assert re.search(told, caplog.text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [SafetensorError("I/O error"), MemoryError(), ValueError("odd")])
def test_whatever_goes_wrong_while_saving_the_work_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Observations, "save", fail)
    monkeypatch.setattr("kv8.calibration.partial._SECONDS_BETWEEN_SAVES", -1.0)
    PartialResult(tmp_path / "out", FACTS).save_now_and_then(SAMPLES, seen(), 2)
    assert "could not be saved" in caplog.text
    assert repr(error) in caplog.text


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_an_interrupt_waits_for_the_end_of_what_must_be_whole(
    number: signal.Signals, error: type[BaseException]
) -> None:
    done = []

    def work() -> None:
        with raised_interrupts(), held_interrupts():
            os.kill(os.getpid(), number)
            done.append("all of it")

    with pytest.raises(error):
        work()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_somebody_has_for_sigterm_is_left_in_charge() -> None:
    received = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with raised_interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_without_an_interrupt_nothing_is_raised() -> None:
    with held_interrupts():
        pass
    with pytest.raises(ValueError, match="own"), held_interrupts():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
