"""A table in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], aligns: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a table; `aligns` has one letter a column (l or r); cells are escaped already."""
    rule = ["---:" if align == "r" else "---" for align in aligns]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))
