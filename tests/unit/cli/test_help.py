"""Help texts: complete, stable, and quick (no torch behind them)."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.command_line import kv8

from kv8.calibration.options import CALIBRATION_FIELDS, ENGINE_OPTIONS
from kv8.options import OPTION_FIELDS
from kv8.sampling_params import SAMPLING_FIELDS

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
BENCHES = ("latency", "throughput", "kernels", "startup")
COMMANDS = (
    "generate",
    "chat",
    "serve",
    "plan",
    "inspect",
    "calibrate",
    "demo",
    "bench",
    *(f"bench {b}" for b in BENCHES),
)
# Sampling parameters that a command printing one text has no use for, or cannot spell.
NO_FLAGS = {"n", "seed", "logprobs", "prompt_logprobs", "structured_outputs"}
TYPER = "0.29.2"  # other versions word and wrap the same help in other ways


@pytest.mark.parametrize("command", ["", *COMMANDS])
@pytest.mark.skipif(version("typer") != TYPER, reason=f"golden texts are those of typer {TYPER}")
def test_help_is_golden(command: str, update_golden: bool, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = kv8(*command.split(), "--help")
    assert result.code == 0
    path = GOLDEN / f"{command.replace(' ', '-') or 'kv8'}.txt"
    if update_golden:
        path.write_text(result.out, encoding="utf-8")
    assert result.out == path.read_text(encoding="utf-8"), "run: pytest --update-golden"


@pytest.mark.parametrize("command", ["", "bench"])
def test_no_command_is_summed_up_in_half_a_sentence(command: str, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = kv8(*command.split(), "--help").out.partition("Commands:")[2]
    assert listed
    assert "..." not in listed


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("generate", "m", "--nope"), "kv8 generate"),
        (("plan",), "kv8 plan"),
        (("chat", "m", "--seed", "x"), "kv8 chat"),
        (("nope",), "kv8"),
    ],
)
def test_a_usage_error_points_at_the_help_that_lists_it(words, command) -> None:
    result = kv8(*words)
    assert result.code == 2
    assert result.err.endswith(f" Try '{command} --help'.\n")


def test_no_words_is_help() -> None:
    assert kv8() == kv8("--help")


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "inspect"])
def test_every_engine_option_is_a_flag(command: str) -> None:
    text = kv8(command, "--help").out.replace(",", " ")  # a comma is followed by another spelling
    for name in OPTION_FIELDS.keys() - {"model"}:
        assert f"--{name.replace('_', '-')} " in text


def test_every_calibration_option_is_a_flag_and_of_the_engine_s_only_those_that_matter() -> None:
    text = kv8("calibrate", "--help").out
    for name in (*CALIBRATION_FIELDS, *ENGINE_OPTIONS):
        assert f"--{name.replace('_', '-')} " in text
    for name in OPTION_FIELDS.keys() - {*CALIBRATION_FIELDS, *ENGINE_OPTIONS, "model"}:
        assert f"--{name.replace('_', '-')} " not in text


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_sampling_parameters_are_flags(command: str) -> None:
    text = kv8(command, "--help").out
    for name in SAMPLING_FIELDS.keys() - NO_FLAGS:
        assert f"--{name.replace('_', '-')} " in text


def test_help_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, kv8, kv8.cli\n"
        f"for command in {COMMANDS!r}:\n"
        "    assert kv8.cli.main([*command.split(), '--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        "assert 'LLM' in dir(kv8)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    import kv8 as package

    assert kv8("--version").out == f"kv8 {package.__version__}\n"


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import kv8 as package

    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        package.Llm  # noqa: B018
