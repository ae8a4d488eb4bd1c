"""docs/pitfalls.md lists every known failure with a test, and the list is the tests' own."""

from pathlib import Path

from tests.docs.pitfalls import FAILURES, collect, page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pitfalls.md"


def test_every_failure_has_a_test() -> None:
    missing = sorted(set(FAILURES) - set(collect()))
    assert not missing, f"no test names these pitfalls in its docstring: {missing}"


def test_the_page_is_current(update_golden: bool) -> None:
    if update_golden:
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run: pytest tests/docs --update-golden"
