"""Columns in the file's order -> the tables of a Trace: sorted, numbered, with times from the trace's base."""

from __future__ import annotations

import polars as pl

from gpudiag.model import tables
from gpudiag.trace.collect import Collector

_TIMES = ("start_ns", "end_ns", "t_ns")
_NAMES = {"ops": "name", "launches": "api", "kernels": "name", "frames": "name", "marks": "name"}
# Whoever starts first comes first; of those that start together the longer one, which is the parent.
_ORDER = {
    "ops": ("thread", "start_ns", "end_ns"),
    "frames": ("thread", "start_ns", "end_ns"),
    "launches": ("start_ns",),
    "kernels": ("start_ns",),
    "marks": ("start_ns",),
    "allocations": ("t_ns",),
}
_FILE_ROW = "file_row"


def base_ns(collector: Collector) -> int | None:
    """Return the smallest start of all events that a table holds, in absolute ns; None where there are none."""
    starts = [
        int(part[column].to_numpy().min())
        for parts in collector.frames.values()
        for part in parts
        for column in ("start_ns", "t_ns")
        if column in part.columns and part.height
    ]
    return min(starts, default=None)


def assemble(collector: Collector, base: int) -> dict[str, pl.DataFrame]:
    """Return all tables of stage 'read'; takes the collector's columns away while it goes, to keep the peak of memory low."""
    found = {}
    places = {}
    for table in _ORDER:
        frame = _sorted(table, _joined(collector, table, base))
        if table in ("ops", "kernels"):
            places[table] = frame[_FILE_ROW].arg_sort()
        found[table] = _finished(table, frame)
    found["signatures"] = _finished("signatures", collector.signatures.frame())
    found["collectives"] = _finished("collectives", _collectives(collector, places))
    return found


def _joined(collector: Collector, table: str, base: int) -> pl.DataFrame:
    """Return the parts of `table` as one frame with names and relative times."""
    parts = collector.frames.pop(table)
    if not parts:
        return tables.empty(table).drop("id")
    frame = pl.concat(parts, rechunk=True)
    parts.clear()
    frame = frame.with_columns(pl.col(column) - base for column in _TIMES if column in frame.columns)
    if table in _NAMES:
        name = _NAMES[table]
        frame = frame.with_columns(collector.names[table].categorical(frame[name]).alias(name))
    if table == "launches":
        frame = frame.with_columns(collector.launched.names.categorical(frame["kernel"]).alias("kernel"))
    return frame


def _sorted(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` in the order of `table`; events that are equal there stay in the file's order."""
    keys = list(_ORDER[table])
    frame = frame.with_row_index(_FILE_ROW)
    return frame.sort(keys, descending=[key == "end_ns" for key in keys], maintain_order=True)


def _finished(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` with its ids and exactly the columns of the schema."""
    ids = pl.int_range(frame.height, dtype=pl.Int64, eager=True).alias("id")
    return frame.with_columns(ids).select(list(tables.schema(table)))


def ordered(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` in the order of `table`, numbered, with exactly the columns of the schema; for readers that have all rows at once."""
    return _finished(table, _sorted(table, frame) if table in _ORDER else frame)


def _collectives(collector: Collector, places: dict[str, pl.Series]) -> pl.DataFrame:
    """Return the collectives with rows of the sorted tables, kernels first."""
    parts = collector.frames.pop("collectives")
    if not parts:
        return tables.empty("collectives").drop("id")
    frame = pl.concat(parts, rechunk=True)
    frame = frame.with_columns(
        places["kernels"].gather(frame["kernel"]).cast(pl.Int64).alias("kernel"),
        places["ops"].gather(frame["op"]).cast(pl.Int64).alias("op"),
    )
    return frame.sort("kernel", "op", nulls_last=True)
