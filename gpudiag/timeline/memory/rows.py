"""Blocks of memory summed by a name, largest first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from gpudiag.model.memory import MemoryRow

MOST_ROWS = 100
"""Rows of each list: the largest."""


def ranked(columns: Mapping[str, Any]) -> tuple[MemoryRow, ...]:
    """Return blocks (columns name, bytes, category) summed by name and category, largest first; those without a name are left out."""
    frame = pl.DataFrame(columns, schema_overrides={"category": pl.String}).drop_nulls("name")
    sums = frame.group_by("name", "category").agg(pl.col("bytes").sum(), pl.len().alias("blocks"))
    sums = sums.sort("bytes", "name", "category", descending=[True, False, False]).head(MOST_ROWS)
    return tuple(MemoryRow(**row) for row in sums.iter_rows(named=True))


def merged(*lists: tuple[MemoryRow, ...]) -> tuple[MemoryRow, ...]:
    """Return all rows, largest first."""
    rows = sorted((row for rows in lists for row in rows), key=lambda row: (-row.bytes, row.name, row.category))
    return tuple(rows[:MOST_ROWS])
