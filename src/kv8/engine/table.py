"""A plain text table: columns as wide as they need be, numbers to the right."""

from collections.abc import Sequence


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return ``rows`` under ``headings``; columns that are empty in all rows are left out."""
    used = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    lines = [[headings[i] for i in used], *([row[i] for i in used] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(used))]
    right = [all(_is_number(row[i]) for row in rows) for i in used]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _is_number(text: str) -> bool:
    return all(c.isdigit() or c in " .,+-%x" for c in text)
