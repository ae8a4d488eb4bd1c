"""docs/checkpoint.md is normative, so what the code knows must stand in it."""

from pathlib import Path

from kv8.scales.names import SPELLINGS
from kv8.scales.provenance import FORMAT, VERSION
from kv8.scales.schemes import SUPPORTED

PAGE = (Path(__file__).parents[3] / "docs" / "checkpoint.md").read_text()


def test_every_spelling_is_documented() -> None:
    for spelling in SPELLINGS:
        assert f"`{spelling.example}`" in PAGE, spelling.example


def test_the_scheme_and_the_file_format_are_documented() -> None:
    for word in ("tensor", "attn_head", "float", FORMAT, VERSION):
        assert f"`{word}`" in PAGE
    for field in ("type", "num_bits", "symmetric", "dynamic", "strategy"):
        assert field in SUPPORTED
        assert f"`{field}`" in PAGE
