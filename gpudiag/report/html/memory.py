"""What the HTML page shows of memory, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpudiag.model.memory import MemoryReport
from gpudiag.report import memory
from gpudiag.report.escape import clean

_MOST_PLACES = 20


def context(found: MemoryReport | None) -> dict[str, Any] | None:
    """Return headline, categories, sentences and places; None where no memory was recorded."""
    if found is None:
        return None
    lists = (("Module", found.by_module), ("Op", found.by_op))
    places = [("Allocated at", memory.site_rows(found, _MOST_PLACES))]
    places += [(title, memory.rows_of(rows, found, _MOST_PLACES)) for title, rows in lists]
    return {
        "headline": memory.headline(found),
        "categories": _categories(found),
        "lines": memory.lines(found),
        "places": [(title, _cleaned(rows)) for title, rows in places if rows],
        "notes": [clean(note, 2_000) for note in found.notes],
    }


def _categories(found: MemoryReport) -> list[tuple[str, str, str, str]]:
    """Return (name, size, share, length of its bar in percent) of what memory was used for at its peak."""
    peak = found.peak_bytes or 1
    rows = zip(memory.category_rows(found), found.by_category.values(), strict=True)
    return [(*row, f"{min(1.0, max(0.0, size / peak)) * 100:.2f}") for row, size in rows]


def _cleaned(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [tuple(clean(text, 300) for text in row) for row in rows]
