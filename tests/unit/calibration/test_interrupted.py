"""A calibration that is broken off late or early: what was done is kept, and not done again."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.observing import numbers
from tests.tiny_models import TinyModel

from kv8.calibration import calibrate as calibration
from kv8.calibration import new_folder, outputs
from kv8.calibration.calibrate import Calibration, calibrate
from kv8.calibration.interrupts import Terminated
from kv8.calibration.observer import ObservingBackend
from kv8.engine.engine import Engine
from kv8.errors import RequestError

SIGNALS = [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
SMALL = {"samples": 12, "max_length": 40, "batch_size": 4}


def small(model: Path, data: Path | str, **options: Any) -> Calibration:
    return calibrate(model, data, use_tqdm=False, **{**SMALL, **options})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"{n} bottles stand on the wall." for n in range(80)))
    return path


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("number", "error"), SIGNALS)
@pytest.mark.parametrize("while_in", ["make_report", "write_scales_file", "write_checkpoint"])
def test_broken_off_after_the_measuring_nothing_is_measured_again(
    tiny_model: TinyModel, tmp_path: Path, text: Path, monkeypatch, number, error, while_in: str
) -> None:
    model, output = tiny_model(), tmp_path / "out"
    place = "calibrate" if while_in == "make_report" else "outputs"
    with monkeypatch.context() as patch:
        patch.setattr(
            f"kv8.calibration.{place}.{while_in}", lambda *_, **__: os.kill(os.getpid(), number)
        )
        with pytest.raises(error):
            small(model, text, output=output, checkpoint=True)
    assert left(tmp_path) == [".out.partial", "text.txt"]
    whole = small(model, text)
    monkeypatch.setattr(ObservingBackend, "attend", lambda *_: pytest.fail("measured again"))
    found = small(model, text, output=output, checkpoint=True)
    assert numbers(found.scales) == numbers(whole.scales)
    assert left(tmp_path) == ["out", "text.txt"]


class Deaf:
    """Python drops what is raised while an object is deleted."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize(("number", "error"), SIGNALS)
@pytest.mark.parametrize(("data", "kept"), [("text", True), ("self", True), ("make_report", False)])
def test_a_signal_that_comes_at_a_deaf_moment_is_not_lost(
    tiny_model: TinyModel, tmp_path: Path, text: Path, monkeypatch, number, error, data: str, kept
) -> None:
    model, output, calls = tiny_model(), tmp_path / "out", []
    place, name, when = {
        "text": (ObservingBackend, "attend", 6),
        "self": (Engine, "step", 50),
        "make_report": (calibration, "make_report", 1),
    }[data]
    real = getattr(place, name)

    def deaf(*arguments: Any) -> Any:
        calls.append(name)
        if len(calls) == when:
            Deaf(number)
        return real(*arguments)

    monkeypatch.setattr(place, name, deaf)
    dropped: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", lambda lost: dropped.append(lost.exc_type))
    with pytest.raises(error):
        small(model, "self" if data == "self" else text, output=output)
    assert dropped == [error]
    # Noticed at the next batch, the next token, or when all is written.
    assert left(tmp_path) == [".out.partial" if kept else "out", "text.txt"]


def test_broken_off_when_all_is_written_it_is_all_written(
    tiny_model: TinyModel, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, flush = tmp_path / "out", new_folder.flush

    def interrupting(path: Path) -> None:
        flush(path)
        if path == tmp_path:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(new_folder, "flush", interrupting)
    with pytest.raises(KeyboardInterrupt):
        small(tiny_model(), text, output=output)
    assert left(tmp_path) == ["out", "text.txt"]
    assert outputs.SCALES_FILE in left(output)


@pytest.mark.parametrize(("number", "error"), SIGNALS)
def test_texts_the_model_has_written_are_not_written_again(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch, caplog, number, error
) -> None:
    """Twelve texts come in groups of four; the second group is broken off."""
    model, output, step, num_steps = tiny_model(), tmp_path / "out", Engine.step, 0
    whole = small(model, "self")

    def counting(self: Engine) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 60:
            os.kill(os.getpid(), number)
        return step(self)

    monkeypatch.setattr(Engine, "step", counting)
    with pytest.raises(error):
        small(model, "self", output=output)
    assert "Stopped after writing 4 of 12 texts" in caplog.text
    assert left(tmp_path) == [".out.partial"]
    num_steps = 1000
    found = small(model, "self", output=output)
    assert num_steps - 1000 < 2.5 * 40  # two groups of three, a token a step
    assert found.samples == whole.samples
    assert numbers(found.scales) == numbers(whole.scales)
    assert left(tmp_path) == ["out"]


def test_a_folder_made_meanwhile_costs_no_work(
    tiny_model: TinyModel, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output, write = tiny_model(), tmp_path / "out", outputs.write_scales_file

    def meanwhile(*arguments: Any) -> None:
        output.mkdir()
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(outputs, "write_scales_file", meanwhile)
        with pytest.raises(RequestError, match="out exists"):
            small(model, text, output=output)
    assert left(tmp_path) == [".out.partial", "out", "text.txt"]
    output.rmdir()
    monkeypatch.setattr(ObservingBackend, "attend", lambda *_: pytest.fail("measured again"))
    assert small(model, text, output=output).files


def test_the_second_into_one_output_is_told_before_it_measures(
    tiny_model: TinyModel, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output, attend, told = tiny_model(), tmp_path / "out", ObservingBackend.attend, []

    def meanwhile(self, *arguments):
        if not told:
            monkeypatch.setattr("kv8.calibration.calibrate.Engine", pytest.fail)
            with pytest.raises(RequestError, match="being made by another calibration") as error:
                small(model, text, output=output)
            told.append(error)
        return attend(self, *arguments)

    monkeypatch.setattr(ObservingBackend, "attend", meanwhile)
    assert small(model, text, output=output).files
    assert told
    assert left(tmp_path) == ["out", "text.txt"]
