"""docs/architecture.md: its map of modules is made from their docstrings, so it cannot go stale."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "kv8"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- modules: pytest tests/docs --update-golden -->\n"

# From the top layer to the bottom, as in pyproject.toml.
PACKAGES = (
    "cli",
    "bench",
    "server",
    "server/protocol",
    "llm.py",
    "calibration",
    "engine",
    "models",
    "attention",
    "cache",
    "kernels",
    "layer_plan",
    "scales",
    "geometry.py",
    "options.py",
    "sampling_params.py",
    "outputs.py",
    "structured_outputs.py",
    "formats",
    "units.py",
    "errors.py",
    "_waiting.py",
)


def summary(path: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def module_map() -> str:
    """Return the map: one line a package or top-level module, one line a module in it."""
    lines = []
    for name in PACKAGES:
        path = SOURCE / name
        if path.is_file():
            lines.append(f"- `{name}`: {summary(path)}")
            continue
        lines.append(f"- **`{name}/`** {summary(path / '__init__.py')}")
        lines += [
            f"  - `{name}/{module.name}`: {summary(module)}"
            for module in sorted(path.glob("*.py"))
            if module.name != "__init__.py"
        ]
    return "\n".join(lines) + "\n"


def test_the_map_is_current(update_golden: bool) -> None:
    head, _, tail = PAGE.read_text().partition(BEGIN)
    if update_golden:
        PAGE.write_text(head + BEGIN + module_map())
        tail = module_map()
    assert tail == module_map(), "run: pytest tests/docs --update-golden"


def test_the_map_has_every_module() -> None:
    covered = {SOURCE / name for name in PACKAGES}
    for path in SOURCE.rglob("*.py"):
        known = path in covered or path.parent in covered
        assert known or path.name in ("__init__.py", "__main__.py", "_version.py"), path


def test_no_module_is_over_the_cap() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert not {str(path): lines for path, lines in lengths.items() if lines > 300}
