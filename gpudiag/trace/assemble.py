"""Columns in the file's order -> the tables of a Trace: sorted, numbered, with times from the trace's base."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.model import tables
from gpudiag.trace.garbage import give_back
from gpudiag.trace.keys import Keys
from gpudiag.trace.store import Store

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

Rows = npt.NDArray[np.int64]


def assemble(store: Store, keys: Keys, base: int) -> dict[str, pl.DataFrame]:
    """Return all tables of stage 'read'; takes the columns out of the store while it goes, to keep the peak of memory low."""
    found = {"collectives": store.collectives()}
    for table in _ORDER:
        give_back()
        columns = store.taken(table)
        if not columns:
            found[table] = tables.empty(table)
            continue
        order = _order(table, columns)
        found[table] = _finished(table, pl.DataFrame([_column(keys, table, columns.pop(name), order, base) for name in list(columns)]))
        if table in ("ops", "kernels"):
            found["collectives"] = _renumbered(found["collectives"], table.removesuffix("s"), order)
    give_back()
    found["signatures"] = _finished("signatures", keys.signatures.frame())
    found["collectives"] = _finished("collectives", found["collectives"].sort("kernel", "op", nulls_last=True))
    return found


def ordered(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` in the order of `table`, numbered, with exactly the columns of the schema; for readers that have all rows at once."""
    return _finished(table, frame[_order(table, frame.to_dict())] if table in _ORDER else frame)


def _column(keys: Keys, table: str, column: pl.Series, order: Rows, base: int) -> pl.Series:
    """Return a column of `table` sorted, with what its codes stand for."""
    name, column = column.name, column.gather(order)
    if name in _TIMES:
        relative: pl.Series = column - base
        return relative
    if name == _NAMES.get(table):
        return keys.names[table].categorical(column).alias(name)
    return keys.launched.names.categorical(column).alias(name) if (table, name) == ("launches", "kernel") else column


def _order(table: str, columns: Mapping[str, pl.Series]) -> Rows:
    """Return the rows in the order of `table`; events that are equal there stay in the file's order, unknown threads come first."""
    by = [columns[key].fill_null(_BEFORE_ALL).to_numpy() for key in reversed(_ORDER[table])]
    if _ORDER[table][-1] == "end_ns":
        by[0] = -by[0]
    rows: Rows = np.lexsort(by)
    return rows


def _finished(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` with its ids and exactly the columns of the schema."""
    ids = pl.int_range(frame.height, dtype=pl.Int64, eager=True).alias("id")
    return frame.with_columns(ids).select(list(tables.schema(table)))


def _renumbered(collectives: pl.DataFrame, side: str, order: Rows) -> pl.DataFrame:
    """Return `collectives` with rows of the sorted table in column `side`."""
    places = np.empty_like(order)
    places[order] = np.arange(order.size)
    return collectives.with_columns(pl.Series(side, places).gather(collectives[side]))
