"""Whether the tables of a trace have their schema."""

from __future__ import annotations

import polars as pl

from gpudiag.model.trace import TRACE_TABLES, Stage, Trace, list_columns


def check_table(table: str, frame: pl.DataFrame, stage: Stage = "read") -> None:
    """Raise AssertionError where `frame` lacks a column of `table` or has it with another dtype."""
    for column in list_columns(table, stage):
        assert column.name in frame.columns, f"{table} lacks column {column.name}"
        found = frame.schema[column.name]
        assert found == column.dtype, f"{table}.{column.name} is {found}, expected {column.dtype}"


def check_trace(trace: Trace, stage: Stage = "read") -> None:
    """Raise AssertionError where a table does not have the schema of `stage` or an id is not its row number."""
    for name in TRACE_TABLES:
        frame: pl.DataFrame = getattr(trace, name)
        check_table(name, frame, stage)
        assert (frame["id"] == pl.int_range(frame.height, eager=True)).all(), f"{name}.id is not the row number"
