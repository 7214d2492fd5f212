"""Tables as files for other tools: columns that carry their unit, a list that explains them, CSV that no spreadsheet runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Literal

import msgspec
import polars as pl

from gpudiag.model import tables
from gpudiag.model.tables import Column
from gpudiag.model.trace import Trace

Format = Literal["csv", "parquet"]

COLUMNS = "columns"
"""Name of the file that explains the columns of all others."""

THREADS = "threads"
"""Table of the host threads, which the schema of traces keeps as metadata."""

_EXPORTED: dict[str, tuple[Column, ...]] = {
    **tables.TABLES,
    THREADS: (
        Column("thread", pl.Int64(), "", "as the column `thread` of the other tables has it"),
        Column("pid", pl.String(), "", "process, as recorded"),
        Column("tid", pl.String(), "", "thread, as recorded"),
        Column("name", pl.String(), "", "name, as recorded; '' where none was"),
    ),
}

_SUFFIXES = {"share": "_share", "B": "_bytes", "FLOP": "_flop", "B/s": "_bytes_per_s", "%": "_pct"}
"""Unit -> what a column of it ends in; of other units it is their own name (`_ns`, `_mhz`, `_ranks`)."""
_TOLD_BY = {"B": "bytes", "FLOP": "flops", "samples": "samples", "elements": "elements"}
"""Unit -> what in a name tells it as well."""
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
"""What a terminal would obey; tab and line feed stay, as quoted cells may hold them."""
_FORMULA = r"^([=+\-@\t\r])"
"""First characters that make a spreadsheet read a cell as a formula (owasp.org/www-community/attacks/CSV_Injection)."""


def exported_name(column: Column) -> str:
    """Return the name of a column in a file: that of the table, with its unit at the end where the name does not tell it."""
    if not column.unit:
        return column.name
    suffix = _SUFFIXES.get(column.unit, f"_{column.unit.lower()}")
    told = column.name.endswith(suffix) or _TOLD_BY.get(column.unit, suffix) in column.name
    return column.name if told else f"{column.name}{suffix}"


def threads(trace: Trace) -> pl.DataFrame:
    """Return the host threads of a trace, so that the numbers of threads in the other tables can be told."""
    rows = [(number, thread.pid, thread.tid, thread.name) for number, thread in enumerate(trace.meta.threads)]
    return pl.DataFrame(rows, schema={column.name: column.dtype for column in _EXPORTED[THREADS]}, orient="row")


def with_units(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` with the columns that the schema of `table` knows, under the names that they have in a file."""
    known = {column.name: exported_name(column) for column in _EXPORTED[table] if column.name in frame.columns}
    return frame.select(pl.col(name).alias(told) for name, told in known.items())


def explained(written: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """Return one row for each column of the tables in `written`: file, column, its name in `gpudiag sql`, type, unit, meaning."""
    rows = [
        (table, exported_name(column), column.name, str(frame.schema[exported_name(column)]), column.unit, column.doc)
        for table, frame in written.items()
        for column in _EXPORTED[table]
        if exported_name(column) in frame.columns
    ]
    return pl.DataFrame(rows, schema=["table", "column", "sql_column", "type", "unit", "meaning"], orient="row")


def put(frame: pl.DataFrame, file: IO[bytes], form: Format) -> None:
    """Write `frame` to `file`, as CSV in the form of `harmless`."""
    if form == "parquet":
        frame.write_parquet(file)
    else:
        harmless(frame).write_csv(file)


def harmless(frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` as CSV can hold it, and spreadsheets and terminals may show it.

    A text that a spreadsheet would run as a formula gets an apostrophe in front, control characters are left out, and what CSV has no form
    for (lists, durations) is JSON.
    """
    told = frame.with_columns(_as_json(column) for column in frame.iter_columns() if _has_no_form(column.dtype))
    texts = [name for name, dtype in told.schema.items() if dtype in (pl.String, pl.Categorical)]
    shown = (pl.col(name).cast(pl.String).str.replace_all(_CONTROL, "").str.replace(_FORMULA, "'${1}") for name in texts)
    return told.with_columns(shown)


def _has_no_form(dtype: pl.DataType) -> bool:
    return dtype.is_nested() or dtype in (pl.Duration, pl.Binary)


def _as_json(column: pl.Series) -> pl.Series:
    texts = [None if value is None else msgspec.json.encode(value).decode().strip('"') for value in column.to_list()]
    return pl.Series(column.name, texts, dtype=pl.String)
