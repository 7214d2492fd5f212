"""SQL over the tables of an analysis: for facts that a rule file defines, and for `gpudiag sql`.

A query is one SELECT (or WITH ... SELECT) in the dialect of polars. It sees the tables of TABLES and nothing else (facts.query_text), so a
rule file cannot reach beyond the recording.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import polars as pl

from gpudiag.facts.query_text import QueryError, checked
from gpudiag.facts.registry import NotKnownError, Unit
from gpudiag.model import tables
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import FactValue
from gpudiag.model.trace import TRACE_TABLES

TABLES: tuple[str, ...] = (*TRACE_TABLES, "steps", "gaps", "idle", "syncs", "critical_path", "step_records", "host_marks", "telemetry")
"""Tables that a query can name; columns: model.tables."""

__all__ = ["TABLES", "QueryError", "analysis_tables", "check", "measure", "run", "tables_of"]

_UNKNOWN_COLUMN = re.compile(r"unable to find column \"([^\"]*)\"|no column named '([^']*)'")
_UNKNOWN_TABLE = re.compile(r"relation '([^']*)' was not found")


def analysis_tables(analysis: Analysis) -> dict[str, pl.DataFrame]:
    """Return the tables of `analysis` by the names that queries use, without those that were not recorded."""
    found = {name: getattr(analysis.trace, name) for name in TRACE_TABLES}
    own = ("steps", "gaps", "idle", "syncs", "critical_path", "step_records", "host_marks")
    found |= {name: table for name in own if (table := getattr(analysis, name)) is not None}
    if analysis.samples is not None:
        found["telemetry"] = analysis.samples
    return found


def run(query: str, found: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """Return the rows of `query` over the tables `found`; raises QueryError.

    A table that is not among `found` has no rows. Names of kernels and ops are plain text.
    """
    text = checked(query, TABLES)
    named = {name: found.get(name, tables.empty(name, "cost")) for name in tables_of(query)}
    context = pl.SQLContext(frames={name: _plain(table) for name, table in named.items()}, register_globals=False)
    try:
        result = context.execute(text, eager=False).collect()
    except Exception as error:  # noqa: BLE001 - polars raises a dozen kinds, and panics of its parser are no reason to stop
        raise _explained(error, tuple(named)) from None
    if not isinstance(result, pl.DataFrame):
        raise QueryError("gives no table")
    return result


def tables_of(query: str) -> tuple[str, ...]:
    """Return the tables of TABLES that `query` may name, found by word: none is missed."""
    words = set(re.findall(r"\w+", query.lower()))
    return tuple(name for name in TABLES if name in words)


def check(query: str, unit: Unit) -> None:
    """Raise QueryError unless `query` yields one column that fits `unit`; tried on tables without rows."""
    result = run(query, {})
    if result.width != 1:
        raise QueryError(f"yields {result.width} columns, a fact is one")
    if not _fits(result.dtypes[0], unit):
        raise QueryError(f"yields {str(result.dtypes[0]).lower()}, which is no {unit if unit in ('bool', 'text') else 'number'}")


def measure(query: str, unit: Unit, found: dict[str, pl.DataFrame]) -> FactValue:
    """Return the single value of `query` in `unit`; raises NotKnownError where a table that it names is empty, or no value comes out.

    An empty table is no zero: most often it means that this was not recorded.
    """
    for name in tables_of(query):
        if name not in found or found[name].is_empty():
            raise NotKnownError(f"this recording has no rows in the table {name!r}")
    result = run(query, found)
    if result.height > 1:
        raise NotKnownError(f"the query yields {result.height} rows, a fact is one")
    value: Any = result.item(0, 0) if result.height else None
    if value is None:
        raise NotKnownError("the query yields no value for this recording")
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise NotKnownError(f"the query yields no finite number ({value})")
    return value if isinstance(value, (bool, int, float)) else str(value)


def _fits(dtype: pl.DataType, unit: Unit) -> bool:
    if dtype == pl.Null:
        return True
    if unit == "bool":
        return dtype == pl.Boolean
    return dtype == pl.String if unit == "text" else dtype.is_numeric()


def _plain(table: pl.DataFrame) -> pl.LazyFrame:
    """Return `table` with categories as text: LIKE knows no other."""
    return table.lazy().with_columns(pl.col(pl.Categorical).cast(pl.String))


def _explained(error: Exception, named: tuple[str, ...]) -> QueryError:
    """Return the error of polars in one line, with the name that is wrong and those that would be right."""
    text = " ".join(str(error).split("Resolved plan until failure")[0].split())
    if unknown := _UNKNOWN_TABLE.search(text):
        return QueryError(f"no table is named {unknown[1]!r}", unknown[1], TABLES)
    if unknown := _UNKNOWN_COLUMN.search(text):
        column = unknown[1] or unknown[2]
        known = tuple(dict.fromkeys(item.name for name in named for item in tables.TABLES[name]))
        return QueryError(f"no column is named {column!r}", column, known)
    return QueryError(text.removeprefix("sql parser error: ").split("; valid columns")[0][:300])
