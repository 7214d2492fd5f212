"""Columns of all events in buffers that grow, then the sorted tables of a Trace; memory that is free goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.model import trace
from gpudiag.trace.columns import Keys


@contextmanager
def pause_cycle_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector: millions of short-lived objects without cycles make it a third of the decoding time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def release_memory() -> None:
    """Return free memory to the system, where its C library can (glibc: malloc_trim(3)); it keeps what lies between what is used."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


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
        before, some_unknown = len(self._values), column.null_count() > 0
        if some_unknown and self._known is None:
            self._known = array("B", b"\1") * before
        self._values.frombytes((column.fill_null(0) if some_unknown else column).to_numpy().view(np.uint8).data)
        if self._known is not None:
            self._known.frombytes(column.is_not_null().to_numpy().view(np.uint8).data)

    def column(self) -> pl.Series:
        values = pl.Series(np.frombuffer(self._values, self._values.typecode), dtype=self._dtype)
        if self._known is None:
            return values
        known = pl.Series(np.frombuffer(self._known, np.bool_))
        return pl.select(pl.when(known).then(values)).to_series()


class Store:
    """The columns of each table, chunk after chunk."""

    def __init__(self) -> None:
        self.base_ns: int | None = None
        """The smallest start of all events that a table holds, in absolute ns; None: there are none."""
        self._columns: dict[str, dict[str, _Numbers | list[pl.Series]]] = {}
        self._rows = Counter[str]()
        self._collectives: list[pl.DataFrame] = []

    def take(self, part: Part) -> None:
        """Append the rows of the next chunk."""
        if (frame := part.get("collectives")) is not None:
            self._collectives.append(frame.with_columns(pl.col(side) + self._rows[f"{side}s"] for side in ("op", "kernel")))
        for table, frame in part.items():
            if table == "collectives" or not frame.height:
                continue
            columns = self._columns.setdefault(table, {})
            for column in frame:
                kept = columns.get(column.name)
                if kept is None:
                    kept = columns[column.name] = [] if column.dtype == pl.String else _Numbers(column.dtype)
                if isinstance(kept, _Numbers):
                    kept.add(column)
                else:
                    kept.append(column)
            self._rows[table] += frame.height
            first = int(frame["t_ns" if table == "allocations" else "start_ns"].to_numpy().min())
            self.base_ns = first if self.base_ns is None else min(first, self.base_ns)

    def take_columns(self, table: str) -> dict[str, pl.Series]:
        """Return the columns of `table`, which the store then no longer has; empty where no event belongs to it."""
        columns = self._columns.pop(table, {})
        found = {}
        for name in list(columns):
            kept = columns.pop(name)
            found[name] = (kept.column() if isinstance(kept, _Numbers) else pl.concat(kept, rechunk=True)).alias(name)
        return found

    def collectives(self) -> pl.DataFrame:
        """Return the collectives with rows of ops and kernels in the file's order."""
        return pl.concat(self._collectives, rechunk=True) if self._collectives else trace.build_empty_table("collectives").drop("id")


_TIMES = ("start_ns", "end_ns", "t_ns")
_NAMES = {"ops": "name", "launches": "api", "kernels": "name", "frames": "name", "marks": "name"}
# Whoever starts first comes first; of those that start together the longer one, which is the parent.
_ORDER = {
    "frames": ("thread", "start_ns", "end_ns"),
    "ops": ("thread", "start_ns", "end_ns"),
    "launches": ("start_ns",),
    "kernels": ("start_ns",),
    "marks": ("start_ns",),
    "allocations": ("t_ns",),
}
_BEFORE_ALL = -(2**63)


def assemble_tables(store: Store, keys: Keys, base: int) -> dict[str, pl.DataFrame]:
    """Return all tables of stage 'read'; takes the columns out of the store while it goes, to keep the peak of memory low."""
    found = {"collectives": store.collectives()}
    for table in _ORDER:
        release_memory()
        columns = store.take_columns(table)
        if not columns:
            found[table] = trace.build_empty_table(table)
            continue
        order = _find_order(table, columns)
        for name in list(columns):  # sorted, with what its codes stand for
            column = columns.pop(name).gather(order)
            if name in _TIMES:
                column = column - base
            elif name == _NAMES.get(table):
                column = keys.names[table].categorical(column).alias(name)
            elif (table, name) == ("launches", "kernel"):
                column = keys.launched.names.categorical(column).alias(name)
            columns[name] = column
        found[table] = _number_rows(table, pl.DataFrame(list(columns.values())))
        if table in ("ops", "kernels"):  # their rows in collectives become those of the sorted table
            side, places = table.removesuffix("s"), np.empty_like(order)
            places[order] = np.arange(order.size)
            found["collectives"] = found["collectives"].with_columns(pl.Series(side, places).gather(found["collectives"][side]))
    release_memory()
    found["signatures"] = _number_rows("signatures", keys.signatures.frame())
    found["collectives"] = _number_rows("collectives", found["collectives"].sort("kernel", "op", nulls_last=True))
    return found


def order_table(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` in the order of `table`, numbered, with exactly the columns of the schema; for readers that have all rows at once."""
    return _number_rows(table, frame[_find_order(table, frame.to_dict())] if table in _ORDER else frame)


def _find_order(table: str, columns: Mapping[str, pl.Series]) -> Ints:
    """Find the rows in the order of `table`; events that are equal there stay in the file's order, unknown threads come first."""
    by = [columns[key].fill_null(_BEFORE_ALL).to_numpy() for key in reversed(_ORDER[table])]
    if _ORDER[table][-1] == "end_ns":
        by[0] = -by[0]
    rows: Ints = np.lexsort(by)
    return rows


def _number_rows(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    ids = pl.int_range(frame.height, dtype=pl.Int64, eager=True).alias("id")
    return frame.with_columns(ids).select(list(trace.build_table_schema(table)))
