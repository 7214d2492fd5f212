"""A query over the tables of one analysed window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpudiag.errors import InputError

if TYPE_CHECKING:
    import polars as pl

    from gpudiag.api import Progress


def query(path: str, text: str, *, rank: int | None = None, window: int | None = None, progress: Progress | None = None) -> pl.DataFrame:
    """Return the rows of the SELECT `text` over the tables of `path` (facts.sql.TABLES; columns: model.tables).

    Raises InputError for a query that is not allowed, or names what is not there; it is tried on tables without rows first.
    """
    from gpudiag.api.analysis import analyse
    from gpudiag.api.inputs import resolve_input
    from gpudiag.facts import sql

    tell = progress or (lambda _: None)
    try:
        sql.run(text, {})
        chosen = resolve_input(path, rank, window)
        tell("reading")
        analysis, _ = analyse(chosen, tell)
        tell("asking")
        return sql.run(text, sql.analysis_tables(analysis))
    except sql.QueryError as error:
        raise InputError(f"the query: {error}{_nearest(error)}", "gpudiag sql --help lists the tables") from None


def columns() -> pl.DataFrame:
    """Return every column that a query can name: its table, name, unit and meaning."""
    import polars as pl

    from gpudiag.facts.sql import TABLES
    from gpudiag.model import tables

    rows = [(name, column.name, column.unit, column.doc) for name in TABLES for column in tables.TABLES[name]]
    return pl.DataFrame(rows, schema=["table", "column", "unit", "what it is"], orient="row")


def _nearest(error: Exception) -> str:
    from gpudiag.errors import nearest

    return nearest(getattr(error, "name", ""), dict.fromkeys(getattr(error, "known", ())))
