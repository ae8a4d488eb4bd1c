"""A whole calibration: measured, reported, written, interrupted, resumed, served."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.observing import numbers
from tests.tiny_models import LAYERS, TinyModel

import kv8
from kv8.calibration import calibrate as module
from kv8.calibration.calibrate import Calibration, calibrate
from kv8.calibration.observations import Observations
from kv8.calibration.observer import ObservingBackend
from kv8.calibration.options import CalibrationOptions
from kv8.calibration.partial import PartialResult
from kv8.errors import CapacityError, OutputError, RequestError, ScaleError
from kv8.llm import LLM

TEXT = "".join(
    f"{n} bottles stand on the wall; one falls, and {n - 1} are left. " for n in range(80)
)
SMALL = {"samples": 24, "max_length": 60, "batch_size": 4}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def small(model: Path, data: Path | str, **options: Any) -> Calibration:
    return calibrate(model, data, use_tqdm=False, **{**SMALL, **options})


def test_it_is_reached_from_the_package() -> None:
    assert kv8.calibrate is calibrate


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_what_is_written_is_what_is_served(
    tiny_model: TinyModel, tmp_path: Path, text: Path, strategy: str, kv_cache_dtype: str
) -> None:
    """Pitfalls 7, 18: the layer table shows the very numbers that were measured, and on what."""
    model, output = tiny_model(dtype=torch.bfloat16), tmp_path / "out"
    found = small(model, text, output=output, strategy=strategy, kv_cache_dtype=kv_cache_dtype)
    scales_file = output / "kv_scales.safetensors"
    assert scales_file in found.files
    report = json.loads((output / "report.json").read_text())
    used = found.report.num_tokens
    measured = used["first"] + used["second"]
    assert report["tokens_asked"] == 24 * 60
    assert sum(used.values()) == found.samples.tokens_used <= 24 * 60
    with LLM(
        model, kv_cache_dtype=kv_cache_dtype, kv_scales=scales_file, kv_cache_memory="2MiB"
    ) as llm:
        for layer in llm.kv_cache_report().layers:
            expected = found.scales.layer(layer.layer)
            for side in ("k", "v"):
                scale = layer.scale(side)  # type: ignore[arg-type]
                assert scale is not None
                assert scale.values == expected.side(side).values  # type: ignore[arg-type]
                assert f"calibration, {measured:,} tokens, absmax" in str(scale.origin)
            assert layer.q is None


def test_query_scales_are_given_when_asked_for(tiny_model: TinyModel, text: Path) -> None:
    model = tiny_model()
    without, with_them = small(model, text), small(model, text, query_scales=True)
    stored = numbers(without.scales)
    assert {side for _, side in stored} == {"k", "v"}
    both = numbers(with_them.scales)
    assert {key: values for key, values in both.items() if key[1] != "q"} == stored
    assert len(both) == 3 * LAYERS
    # Queries are measured and reported in any case.
    assert len(without.report.rows) == len(with_them.report.rows) == 3 * LAYERS


@pytest.mark.parametrize("data", ["random", "self"])
def test_data_nobody_has_to_bring_is_the_same_every_time(tiny_model: TinyModel, data: str) -> None:
    model = tiny_model()
    one, other = (small(model, data, samples=5, max_length=40) for _ in range(2))
    assert numbers(one.scales) == numbers(other.scales)
    assert one.samples.digest == other.samples.digest
    assert one.samples.tokens_used == one.samples.tokens_asked == 200
    again = small(model, data, samples=5, max_length=40, seed=1)
    assert again.samples.digest != one.samples.digest


def interrupted_after(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ctrl-C be pressed while the step after so many attention calls is computed."""
    attend, calls = ObservingBackend.attend, 0

    def counting(self, *arguments):
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGINT)
        return attend(self, *arguments)

    monkeypatch.setattr(ObservingBackend, "attend", counting)


@pytest.mark.parametrize("data", ["text", "self"])
@pytest.mark.parametrize("statistic", ["absmax", "llmcompressor"])
def test_interrupted_and_called_again_it_gives_what_it_would_have_given(
    tiny_model: TinyModel, tmp_path: Path, text: Path, monkeypatch, data: str, statistic: str
) -> None:
    """Killed half-way: no output, what was seen is kept, and the same call finishes the work."""
    model, output = tiny_model(dtype=torch.bfloat16), tmp_path / "out"
    source = text if data == "text" else data
    # Steps as small as where there is no matrix unit: the interrupt comes in the third batch.
    how = {"statistic": statistic, "max_num_batched_tokens": 64}
    whole = small(model, source, **how)
    with monkeypatch.context() as patch:
        interrupted_after(40, patch)
        with pytest.raises(KeyboardInterrupt):
            small(model, source, **how, output=output)
    assert not output.exists()
    partial = tmp_path / ".out.partial"
    assert partial.exists()

    resumed: list[int] = []
    load = PartialResult._load

    def noting(self) -> None:
        load(self)
        resumed.append(self.num_done)

    monkeypatch.setattr(PartialResult, "_load", noting)
    found = small(model, source, **how, output=output)
    assert resumed
    assert 0 < resumed[0] < 24
    assert numbers(found.scales) == numbers(whole.scales)
    assert found.report.rows == whole.report.rows
    assert found.samples == whole.samples
    assert output.is_dir()
    assert not partial.exists()


WAITS_AFTER_ITS_SECOND_SAVE = """
import sys, time
from kv8.calibration import partial
from kv8.calibration.observer import ObservingBackend
from kv8.cli import main

partial._SECONDS_BETWEEN_SAVES = -1.0  # after every batch
save, attend, saves = partial.PartialResult.save, ObservingBackend.attend, []

def noting(self, *state):
    saves.append(state)
    return save(self, *state)

def waiting(self, *arguments):
    if len(saves) == 2:
        print("saved twice", flush=True)
        time.sleep(60)
    return attend(self, *arguments)

partial.PartialResult.save, ObservingBackend.attend = noting, waiting
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)]
)
def test_a_killed_process_leaves_what_it_last_saved(
    tiny_model: TinyModel, tmp_path: Path, text: Path, number: signal.Signals, code: int
) -> None:
    """What stands in the file is a whole number of batches; the rest is done again."""
    model, output = tiny_model(), tmp_path / "out"
    command = ["calibrate", model, "--data", text, "--output", output]
    for name, value in SMALL.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with subprocess.Popen(
        [sys.executable, "-c", WAITS_AFTER_ITS_SECOND_SAVE, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saved twice\n"
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == code, told
    if number == signal.SIGTERM:
        assert "Stopped after 8 of 24 samples. What was seen is kept" in told
        assert told.endswith("kv8: terminated\n")
    assert not output.exists()
    assert (tmp_path / ".out.partial").exists()
    found = small(model, text, output=output)
    assert numbers(found.scales) == numbers(small(model, text).scales)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]


def test_a_disk_that_fills_up_costs_no_work(
    tiny_model: TinyModel, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output = tiny_model(), tmp_path / "out"

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kv8.calibration.outputs.write_scales_file", fail)
        with pytest.raises(OutputError, match="No space left on device"):
            small(model, text, output=output)
    assert not output.exists()
    monkeypatch.setattr(ObservingBackend, "attend", lambda *_: pytest.fail("observed again"))
    assert small(model, text, output=output).files
    assert output.is_dir()


def test_other_options_do_not_go_on_from_it(
    tiny_model: TinyModel, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output = tiny_model(), tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupted_after(40, patch)
        with pytest.raises(KeyboardInterrupt):
            small(model, text, output=output)
    with pytest.raises(RequestError, match=r"another calibration: batch_size was 4, is 3"):
        small(model, text, output=output, batch_size=3)
    with pytest.raises(RequestError, match=r"another calibration: samples was 24, is 20\."):
        small(model, text, output=output, samples=20)
    text.write_text(TEXT[::-1])
    with pytest.raises(RequestError, match=r"the content of data \(.*text\.txt\) has changed"):
        small(model, text, output=output)
    text.write_text(TEXT)
    # The statistic is chosen when all is seen, so another one may go on.
    assert small(model, text, output=output, statistic="mse").files


def test_a_bypassed_layer_is_named_and_nothing_is_written(
    tiny_model: TinyModel, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pitfall 16: a layer calibration did not see fails it; no file is left."""
    note = ObservingBackend._note

    def note_all_but_layer_1(self, layer, side, *rest):
        if layer.geometry.layer != 1:
            note(self, layer, side, *rest)

    monkeypatch.setattr(ObservingBackend, "_note", note_all_but_layer_1)
    with pytest.raises(ScaleError, match=r"queries of layer 1 \(0\), keys of layer 1"):
        small(tiny_model(), text, output=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples must be a whole number of at least 1, got 0"),
        ({"max_length": 3}, "max_length must be a whole number of at least 16"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": True}, "batch_size must be a whole number"),
        ({"held_out": 1}, "held_out must be a share of at least 0 and less than 1, got 1"),
        ({"held_out": "half"}, "held_out must be a share"),
        ({"kv_cache_dtype": "bfloat16"}, "takes no scales.*Allowed: fp8_e4m3, fp8_e5m2"),
        ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype='fp9' is not known"),
        ({"checkpoint": True}, "no output folder"),
        ({"checkpoint": 1}, "checkpoint must be True or False"),
        ({"output": ""}, "output must be the name of a folder"),
        ({"statistic": "mean"}, "statistic='mean' is not known"),
        ({"strategie": "tensor"}, "'strategie' is not known. Did you mean strategy"),
        ({"block_size": 16}, "'block_size' does not concern a calibration"),
        ({"dtype": "int8"}, "dtype='int8' is not known"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_read(
    tiny_model: TinyModel, text: Path, monkeypatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(module, "Engine", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(RequestError, match=message):
        calibrate(tiny_model(), text, use_tqdm=False, **options)


def test_an_output_that_exists_is_refused_before_weights_are_read(
    tiny_model: TinyModel, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Engine", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(RequestError, match="exists"):
        small(tiny_model(), text, output=tmp_path)


def test_samples_are_no_longer_than_the_model_allows(tiny_model: TinyModel, text: Path) -> None:
    found = calibrate(tiny_model(), text, use_tqdm=False, samples=3)
    assert max(map(len, found.samples.sequences)) <= 512
    assert found.samples.tokens_asked == 3 * 512
    calibrate(tiny_model(), text, use_tqdm=False, samples=3, max_length=512)
    told = r"max_length=513 is longer than .* can read: at most 512 tokens\. Give no more"
    with pytest.raises(RequestError, match=told):
        calibrate(tiny_model(), text, use_tqdm=False, samples=3, max_length=513)


def test_a_batch_is_no_larger_than_the_samples(
    tiny_model: TinyModel, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = small(tiny_model(), text, samples=4, batch_size=10**9)
    assert numbers(found.scales) == numbers(small(tiny_model(), text, samples=4).scales)

    def refuse(*_: object, **__: object) -> None:
        raise CapacityError("8 GiB could not be allocated.")

    monkeypatch.setattr("kv8.calibration.collect.Runner", refuse)
    told = r"no memory for 3 samples of up to 60 tokens at once .*Lower batch_size \(--batch-size\)"
    with pytest.raises(CapacityError, match=told):
        small(tiny_model(), text, samples=4, batch_size=3)


def test_llmcompressor_holds_nothing_out_unless_asked() -> None:
    assert CalibrationOptions(data="random", statistic="llmcompressor").held_out_share == 0
    assert (
        CalibrationOptions(data="random", statistic="llmcompressor", held_out=0.2).held_out_share
        == 0.2
    )
    assert CalibrationOptions(data="random").held_out_share == 0.1


def test_observations_of_random_tokens_say_so(tiny_model: TinyModel, tmp_path: Path) -> None:
    found = small(tiny_model(), "random", samples=5, max_length=32, output=tmp_path / "out")
    assert str(found.scales.layer(0).k.origin).endswith("random tokens, absmax")
    assert Observations("float32").source == ""


def test_a_limit_on_a_files_size_is_said_with_both_sizes(
    tiny_model: TinyModel, tmp_path: Path, text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the progress nor the report can be written: that is an error of kv8's, and told."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(OutputError) as error:
            small(tiny_model(), text, output=tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.exit_code == 1
    told = (
        rf"{tmp_path / 'out'} cannot be written: report\.json takes .* KiB: File too large "
        rf"\(a file may have 2\.93 KiB, says ulimit -f\)\. Nothing was left behind"
    )
    assert re.match(told, str(error.value))
    assert "writing-" not in str(error.value)
    assert re.search(r"progress could not be saved .*\.out\.partial takes .* KiB", caplog.text)
    assert list(tmp_path.iterdir()) == [text]
