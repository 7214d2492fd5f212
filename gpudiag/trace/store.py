"""Columns of all events read so far, in the file's order, in buffers that grow: a number takes its own bytes and hardly more."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np
import polars as pl

from gpudiag.model import tables

Part = dict[str, pl.DataFrame]
"""What one chunk holds of each table. Rows in collectives count from the start of their chunk, times from the clock's zero."""

_CODES: dict[pl.DataType, str] = {pl.Int64(): "q", pl.Float64(): "d", pl.UInt32(): "I"}


class _Numbers:
    """A numeric column: the parts of a list would leave as many holes in the memory when they are joined."""

    def __init__(self, dtype: pl.DataType) -> None:
        self._dtype = dtype
        self._values = array(_CODES[dtype])
        self._known: array[int] | None = None

    def add(self, column: pl.Series) -> None:
        """Append the values of a chunk."""
        before, some_unknown = len(self._values), column.null_count() > 0
        if some_unknown and self._known is None:
            self._known = array("B", b"\1") * before
        self._values.frombytes((column.fill_null(0) if some_unknown else column).to_numpy().view(np.uint8).data)
        if self._known is not None:
            self._known.frombytes(column.is_not_null().to_numpy().view(np.uint8).data)

    def column(self) -> pl.Series:
        """Return all values; null where the file has none."""
        values = pl.Series(np.frombuffer(self._values, self._values.typecode), dtype=self._dtype)
        if self._known is None:
            return values
        known = pl.Series(np.frombuffer(self._known, np.bool_))
        return pl.select(pl.when(known).then(values)).to_series()


class _Texts:
    """A column of texts."""

    def __init__(self) -> None:
        self._parts: list[pl.Series] = []

    def add(self, column: pl.Series) -> None:
        """Append the texts of a chunk."""
        self._parts.append(column)

    def column(self) -> pl.Series:
        """Return all texts."""
        return pl.concat(self._parts, rechunk=True)


class Store:
    """The columns of each table, chunk after chunk."""

    def __init__(self) -> None:
        self.base_ns: int | None = None
        """The smallest start of all events that a table holds, in absolute ns; None: there are none."""
        self._columns: dict[str, dict[str, _Numbers | _Texts]] = {}
        self._rows = Counter[str]()
        self._collectives: list[pl.DataFrame] = []

    def take(self, part: Part) -> None:
        """Append the rows of the next chunk."""
        if (frame := part.get("collectives")) is not None:
            self._collectives.append(frame.with_columns(pl.col(side) + self._rows[f"{side}s"] for side in ("op", "kernel")))
        for table, frame in part.items():
            if table != "collectives" and frame.height:
                self._append(table, frame)

    def taken(self, table: str) -> dict[str, pl.Series]:
        """Return the columns of `table`, which the store then no longer has; empty where no event belongs to it."""
        columns = self._columns.pop(table, {})
        return {name: columns.pop(name).column().alias(name) for name in list(columns)}

    def collectives(self) -> pl.DataFrame:
        """Return the collectives with rows of ops and kernels in the file's order."""
        return pl.concat(self._collectives, rechunk=True) if self._collectives else tables.empty("collectives").drop("id")

    def _append(self, table: str, frame: pl.DataFrame) -> None:
        columns = self._columns.setdefault(table, {})
        for column in frame:
            kept = columns.get(column.name)
            if kept is None:
                kept = columns[column.name] = _Texts() if column.dtype == pl.String else _Numbers(column.dtype)
            kept.add(column)
        self._rows[table] += frame.height
        first = int(frame["t_ns" if table == "allocations" else "start_ns"].to_numpy().min())
        self.base_ns = first if self.base_ns is None else min(first, self.base_ns)
