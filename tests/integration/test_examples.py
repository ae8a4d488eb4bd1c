"""The scripts in examples/ run, on tiny models."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
FAMILIES = {"skip_layers": "gemma3"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example(path: Path, tiny_model, monkeypatch, capsys) -> None:
    model = tiny_model(FAMILIES.get(path.stem, "llama"))
    monkeypatch.setattr(sys, "argv", [str(path), str(model)])
    runpy.run_path(str(path), run_name="__main__")
    assert "fp8_e4m3" in capsys.readouterr().out
