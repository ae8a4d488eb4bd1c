"""docs/architecture.md names every package and module, and only those that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def modules() -> set[str]:
    source = ROOT / "src" / "kv8"
    paths = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    return {path for path in paths if not path.endswith("__init__.py") and "_version" not in path}


def test_every_module_is_on_the_page() -> None:
    missing = sorted(module for module in modules() if f"`{module}`" not in PAGE)
    assert not missing, f"docs/architecture.md does not mention: {missing}"


def test_every_module_on_the_page_exists() -> None:
    named = set(re.findall(r"`([a-z_/0-9]+\.py)`", PAGE))
    gone = sorted(named - modules())
    assert not gone, f"docs/architecture.md mentions modules that do not exist: {gone}"


def test_no_module_is_over_the_cap() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in (ROOT / "src").rglob("*.py")
    }
    assert not {path: lines for path, lines in lengths.items() if lines > 300}
