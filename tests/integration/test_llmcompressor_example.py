"""The example's check tells measured scales from memory nobody wrote to."""

import runpy
from pathlib import Path

import pytest
from tests.checkpoint_folders import GOLDEN, golden_folder, write_folder

SCRIPT = Path(__file__).parents[2] / "examples" / "llmcompressor" / "check_scales.py"
SETS = sorted(path.name for path in GOLDEN.iterdir() if (path / "scales.safetensors").is_file())
check = runpy.run_path(str(SCRIPT))["refuse_unusable_scales"]


@pytest.mark.parametrize("name", SETS)
def test_unwritten_q_scales_are_refused_and_measured_ones_are_not(
    name: str, tmp_path: Path
) -> None:
    folder = golden_folder(tmp_path, name)
    if name.endswith("llmc0.14.0.1"):
        with pytest.raises(ValueError, match=r"30 of 90 scales .* never measured.*q_scale"):
            check(folder)
    else:
        assert check(folder) >= 36


def test_a_folder_without_scales_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no KV cache scales"):
        check(write_folder(tmp_path, {"model.norm.weight": 1.0}))
