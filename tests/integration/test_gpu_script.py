"""The GPU script runs from end to end: on the CPU, tiny, kernels in Triton's interpreter."""

import json
import os
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import correctness, plan
from benchmarks.gpu.sections import Context, Run, Section, row
from tests.attention_backends import triton_backend
from tests.flash3_stand_in import stand_in

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = (
    "environment", "correctness", "long_context", "engines", "kernels", "whole_engine", "peer",
)  # fmt: skip


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a dry run wrote; it passed."""
    triton_backend()  # or skip; the interpreter's own set-up, once and not at every launch
    folder = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kv8.bench.roof._BUFFER_BYTES", 2**20)  # its speed means nothing here
        code = program.main(["--dry-run", "--out", str(folder)])
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert code == 0, found
    return found


def test_every_section_runs(dry: dict[str, Any]) -> None:
    assert tuple(dry["sections"]) == SECTIONS
    assert {found["status"] for found in dry["sections"].values()} == {"passed"}
    assert dry["dry_run"] is True


def test_the_table_has_every_figure_of_the_plan(dry: dict[str, Any]) -> None:
    rows = [row["what"] for found in dry["sections"].values() for row in found.get("rows", ())]
    for figure in (
        "copy bandwidth",
        "e4m3: of copy bandwidth",
        "e4m3 over own bf16",
        "causal, bf16, triton",
        "causal, e4m3, FP8 attention, triton",
        "causal, e4m3, FP8 attention, triton, values as codes",
        "decode 96 beside 1 x 8, e4m3: of copy bandwidth",
        "store 32 tokens, e4m3",
        "fp8: of the roof of weights and cache",
        "fp8 over bf16",
        "end to end over generate_batch",
    ):
        assert any(figure in row for row in rows), f"{figure} is not among {rows}"
    assert not any("goal" in row for found in dry["sections"].values()
                   for row in found.get("rows", ()))  # fmt: skip


def test_a_section_that_breaks_is_recorded_and_hides_nothing(tmp_path: Path, monkeypatch) -> None:
    """The traceback is in the JSON, the sections after it run, and the exit code says so."""
    sections = {
        "broken": Section(lambda _: {"passed": 1 / 0}, 0, ""),
        "late": Section(lambda _: {"passed": True}, 1e9, ""),
        "wrong": Section(lambda _: {"passed": False, "rows": []}, 0, ""),
        "fine": Section(lambda _: {"passed": True}, 0, ""),
    }
    monkeypatch.setattr(plan, "SECTIONS", sections)
    assert program.main(["--dry-run", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "results.json").read_text())["sections"]
    assert [each["status"] for each in found.values()] == ["error", "skipped", "failed", "passed"]
    assert "ZeroDivisionError" in found["broken"]["traceback"]
    assert "left" in found["late"]["reason"]


def test_flash_attention_3_is_compared_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in here: the rows, and who attends prompts with `auto`."""
    triton_backend()  # or skip
    module = ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec("flash_attn_interface", None)
    module.flash_attn_with_kvcache = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr("kv8.bench.roof._BUFFER_BYTES", 2**20)
    code = program.main(["--dry-run", "--out", str(tmp_path), "--only", "kernels"])
    found = json.loads((tmp_path / "results.json").read_text())["sections"]["kernels"]
    assert code == 0, found
    rows = {row["what"]: row for row in found["rows"]}
    decode = rows["decode 2 x 96, e4m3: over FlashAttention 3 FP8"]
    assert list(decode["theirs_us"]) == ["0 splits"]
    assert decode["value"] > 0
    assert decode["problems"] == {}
    for name in ("bf16", "e4m3, FP8 attention"):
        prompt = f"prefill 48 causal, {name}"
        assert {f"{prompt}, triton", f"{prompt}, flash3"} <= rows.keys()
        assert f"{prompt}: what auto chose over FlashAttention 3" in rows


def test_a_section_that_hangs_is_ended_and_keeps_its_rows(tmp_path: Path, monkeypatch) -> None:
    """What comes after it still runs, within the whole time."""

    def hang(context: Context) -> dict[str, Any]:
        context.rows.append(row("decode", 0.9, unit=""))
        try:
            time.sleep(60)
        except Exception:  # noqa: BLE001 - as code that has a way around failures
            time.sleep(60)
        return {"passed": True}

    sections = {
        "hangs": Section(hang, 0, "", most=0.2),
        "fine": Section(lambda _: {"passed": True}, 0, ""),
    }
    monkeypatch.setattr(plan, "SECTIONS", sections)
    assert program.main(["--dry-run", "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "results.json").read_text())["sections"]
    assert [each["status"] for each in found.values()] == ["error", "passed"]
    assert "OutOfTimeError" in found["hangs"]["error"]
    assert [each["what"] for each in found["hangs"]["rows"]] == ["decode"]


def test_a_case_that_is_wrong_or_gives_nothing_fails_the_section(tmp_path: Path) -> None:
    """The processes' reports are judged; a line in which one was ended is no report."""
    file = tmp_path / "0.json"
    file.write_text('{"name": "one", "problems": []}\n{"name": "two", "pro')
    assert correctness._read(file) == [{"name": "one", "problems": []}]
    assert correctness._read(tmp_path / "none.json") == []
    context = Context(torch.device("meta"), dry=True, deadline=time.monotonic() + 60)
    found = correctness.body(context)
    assert found["passed"] is False
    assert all(each["problems"] for each in found["failed"])
    assert len(found["failed"]) == found["cases"] == 2


def test_a_missed_goal_is_seen_and_fails_nothing(tmp_path: Path) -> None:
    """In the JSON, in the table and after it; the exit code is about what is right."""
    rows = [
        row("decode, e4m3: of copy bandwidth", 0.9, unit="", goal=0.88),
        row("decode, e4m3 over own bf16", 1.5, unit="x", goal=1.7),
        row("copy bandwidth", 4.2, unit="TB/s"),
    ]
    run = Run(tmp_path, limit=60, dry=True)
    run._context.dry = False
    run.section("kernels", Section(lambda _: {"passed": True, "rows": rows}, 0, ""))
    assert run.passed
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["passed"] is True
    assert found["goals"] == {
        "met": ["decode, e4m3: of copy bandwidth"], "missed": ["decode, e4m3 over own bf16"]
    }  # fmt: skip
    lines = run.summary().splitlines()
    assert "decode, e4m3 over own bf16: 1.5 x  (goal 1.7: MISSED)" in lines
    assert "1 of 2 goals missed" in lines
    assert "  MISSED decode, e4m3 over own bf16" in lines


def test_a_lost_gpu_is_left_to_a_new_process(tmp_path: Path, monkeypatch) -> None:
    """After a bad address a process can do nothing with a GPU; the sections left still run."""
    passing = Section(lambda _: {"passed": True}, 0, "")
    monkeypatch.setattr(plan, "SECTIONS", dict.fromkeys(("first", "second", "third"), passing))
    monkeypatch.setattr(Run, "gpu_answers", lambda run: "second" not in run._sections)
    commands = []

    def start(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, program.main(command[3:]))

    monkeypatch.setattr(program.subprocess, "run", start)
    assert program.main(["--dry-run", "--out", str(tmp_path)]) == 0
    [words] = commands
    assert words[words.index("--only") + 1 :] == ["third", "--dry-run"]
    found = json.loads((tmp_path / "results.json").read_text())["sections"]
    assert list(found) == ["first", "second", "third"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="torch sees no GPU here"):
        program.main(["--out", str(tmp_path)])


def test_the_script_takes_a_folder_and_options(tmp_path: Path) -> None:
    result = subprocess.run(
        [ROOT / "benchmarks" / "gpu.sh", tmp_path / "results", "--help"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "--dry-run" in result.stdout
