"""Rows that a query yields, as a document."""

from __future__ import annotations

import polars as pl

from gpudiag.report.blocks import Column, Document, Kind, Table, build_row, say_all

MAX_ROWS = 100


def build_rows_document(
    found: pl.DataFrame, most: int = MAX_ROWS, more: str = "--csv has all", texts: Kind = "words", name: str = "gpudiag sql"
) -> Document:
    """Return the first `most` rows as a table, with how many there are; `more`: where the rest is to be had; `texts`: how texts stand."""
    columns = tuple(Column(title, "number" if dtype.is_numeric() else texts) for title, dtype in found.schema.items())
    rows = []
    for row in found.head(most).iter_rows():
        cells = (f"{value:.6g}" if isinstance(value, float) else "null" if value is None else str(value) for value in row)
        rows.append(build_row(*cells))
    rest = f" (the first {most} are shown; {more})" if found.height > most else ""
    count = f"{found.height:,} row{'' if found.height == 1 else 's'}{rest}"
    return Document(name, "", leads=(Table(columns, tuple(rows), wide=True), *say_all([count])))


def join_columns(columns: pl.DataFrame) -> pl.DataFrame:
    """Return the tables with the names of their columns, a row each; `columns`: a row for each column (queries.list_columns)."""
    named = [(name, ", ".join(rows["column"].to_list())) for (name,), rows in columns.group_by("table", maintain_order=True)]
    return pl.DataFrame(named, schema=["table", "columns (--csv: with unit and meaning)"], orient="row")
