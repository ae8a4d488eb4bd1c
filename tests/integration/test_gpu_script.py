"""The GPU script runs from end to end: on the CPU, tiny, kernels in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("environment", "correctness", "long_context", "engines", "kernels", "whole_engine")


def run(folder: Path, *words: str) -> tuple[int, str]:
    """Return exit code and output of benchmarks/gpu.sh."""
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)  # the script sets it
    result = subprocess.run(
        [ROOT / "benchmarks" / "gpu.sh", folder, *words],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a dry run wrote; it passed."""
    folder = tmp_path_factory.mktemp("gpu")
    code, output = run(folder, "--dry-run")
    assert code == 0, output
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
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
        "store 32 tokens, e4m3",
        "fp8: of the roof of weights and cache",
        "fp8 over bf16",
    ):
        assert any(figure in row for row in rows), f"{figure} is not among {rows}"
    assert not any("goal" in row for found in dry["sections"].values()
                   for row in found.get("rows", ()))  # fmt: skip


def test_a_section_that_breaks_is_recorded_and_hides_nothing(tmp_path: Path) -> None:
    """The traceback is in the JSON, the sections after it run, and the exit code says so."""
    program = (
        "import sys; from benchmarks.gpu import plan, __main__ as program;"
        "from benchmarks.gpu.sections import Section;"
        "plan.SECTIONS.clear();"
        "plan.SECTIONS.update(broken=Section(lambda c: 1 / 0, 0, ''),"
        " late=Section(lambda c: {}, 1e9, ''), fine=Section(lambda c: {'passed': True}, 0, ''));"
        f"sys.exit(program.main(['--dry-run', '--out', {str(tmp_path)!r}]))"
    )
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    result = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    found = json.loads((tmp_path / "results.json").read_text())["sections"]
    assert [each["status"] for each in found.values()] == ["error", "skipped", "passed"]
    assert "ZeroDivisionError" in found["broken"]["traceback"]
    assert "seconds" in found["late"] and "left" in found["late"]["reason"]


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, output = run(tmp_path)
    assert code == 1
    assert "torch sees no GPU here" in output
