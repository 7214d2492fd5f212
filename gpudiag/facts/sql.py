"""SQL over the tables of an analysis, for facts that a rule file defines and for `gpudiag sql`: one SELECT over known tables.

A query is one SELECT (or WITH ... SELECT) in the dialect of polars, whose SQLContext knows the tables of QUERY_TABLES and nothing else, so
a rule file cannot reach beyond the recording. polars' own functions of tables (read_csv and the like) open files: their names are refused.
What runs is not the text as given but its tokens as read here, without comments, so that nothing can hide between them.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import polars as pl

from gpudiag.facts.registry import NotKnownError, Unit
from gpudiag.model import trace
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import FactValue
from gpudiag.model.trace import TRACE_TABLES

MAX_QUERY_LENGTH = 4_000
"""Characters of a query: far beyond a readable one."""

MAX_QUERY_TOKENS = 600
"""Words and signs of a query: polars takes 0.3 s for 300 terms of a sum, and many times as long for ten times as many (measured)."""

MAX_QUERY_PARTS = 24
"""How often names that WITH gives may stand in a query: parts that name the last one twice double the work each time."""

_TOKEN = re.compile(
    r"(?P<gap>\s+|--[^\n]*|/\*.*?\*/)"
    r"|(?P<text>'(?:[^'\\]|'')*')"
    r'|(?P<quoted>"[^"\\]+")'
    r"|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<sign>\|\||::|<=|>=|<>|!=|==|[-+*/%<>=(),.;\[\]])",
    re.DOTALL | re.ASCII,
)
"""What a query is made of. Dialects differ on backslashes, $, # and backquotes: a text with them could be read in two ways."""

_OUTSIDE = re.compile(r"read_\w*|scan_\w*|generate_\w*|\w*range|unnest|recursive")
"""Names of polars' functions that open files or make rows of their own; and WITH RECURSIVE, on which polars does not come back."""


class QueryError(Exception):
    """A query that is not allowed or cannot be run. `name`: what it calls a table or column that is none; `known`: what there is."""

    def __init__(self, message: str, name: str = "", known: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.known = known


def clean_query(query: str) -> str:
    """Return `query` without comments; raises QueryError unless it is one short SELECT, or WITH ... SELECT, without functions of tables."""
    if len(query) > MAX_QUERY_LENGTH:
        raise QueryError(f"longer than {MAX_QUERY_LENGTH} characters")
    tokens, position = list[tuple[str, str]](), 0
    while position < len(query):
        match = _TOKEN.match(query, position)
        if match is None:
            raise QueryError(f"{query[position]!r} is not allowed, at {query[position : position + 20]!r}")
        tokens.append((match.lastgroup or "", match[0]))
        position = match.end()
    words = [(kind, text.lower().strip('"')) for kind, text in tokens if kind != "gap"]
    if len(words) > MAX_QUERY_TOKENS:
        raise QueryError(f"more than {MAX_QUERY_TOKENS} words and signs")
    if not words or words[0] not in (("word", "select"), ("word", "with")):
        raise QueryError("only SELECT, or WITH ... SELECT")
    for kind, name in words:
        if kind in ("word", "quoted") and _OUTSIDE.fullmatch(name):
            raise QueryError(f"{name} is not allowed: a query sees only the tables {', '.join(QUERY_TABLES)}")
    names = [name for _, name in words]
    given = {one for one, two, three in zip(names, names[1:], names[2:], strict=False) if (two, three) == ("as", "(")}
    if sum(name in given for name in names) > MAX_QUERY_PARTS:
        raise QueryError(f"names parts of WITH more than {MAX_QUERY_PARTS} times")
    return "".join(" " if kind == "gap" else text for kind, text in tokens).strip()


QUERY_TABLES: tuple[str, ...] = (
    *TRACE_TABLES,
    "steps",
    "gaps",
    "idle",
    "syncs",
    "critical_path",
    "step_records",
    "host_marks",
    "telemetry",
)
"""Tables that a query can name; columns: model.trace."""

_UNKNOWN_COLUMN = re.compile(r"unable to find column \"([^\"]*)\"|no column named '([^']*)'")
_UNKNOWN_TABLE = re.compile(r"relation '([^']*)' was not found")


def list_analysis_tables(analysis: Analysis) -> dict[str, pl.DataFrame]:
    """Return the tables of `analysis` by the names that queries use, without those that were not recorded."""
    found = {name: getattr(analysis.trace, name) for name in TRACE_TABLES}
    own = ("steps", "gaps", "idle", "syncs", "critical_path", "step_records", "host_marks")
    found |= {name: table for name in own if (table := getattr(analysis, name)) is not None}
    if analysis.samples is not None:
        found["telemetry"] = analysis.samples
    return found


def run_query(query: str, found: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """Return the rows of `query` over the tables `found`; raises QueryError.

    A table that is not among `found` has no rows. Names of kernels and ops are plain text.
    """
    text = clean_query(query)
    named = {name: found.get(name, trace.build_empty_table(name, "cost")) for name in find_query_tables(query)}
    context = pl.SQLContext(
        frames={name: table.lazy().with_columns(pl.col(pl.Categorical).cast(pl.String)) for name, table in named.items()},
        register_globals=False,
    )
    try:
        result = context.execute(text, eager=False).collect()
    except Exception as error:  # noqa: BLE001 - polars raises a dozen kinds, and panics of its parser are no reason to stop
        raise _explain_error(error, tuple(named)) from None
    if not isinstance(result, pl.DataFrame):
        raise QueryError("gives no table")
    return result


def find_query_tables(query: str) -> tuple[str, ...]:
    """Return the tables of QUERY_TABLES that `query` may name, found by word: none is missed."""
    words = set(re.findall(r"\w+", query.lower()))
    return tuple(name for name in QUERY_TABLES if name in words)


def check_query(query: str, unit: Unit) -> None:
    """Raise QueryError unless `query` yields one column that fits `unit`; tried on tables without rows."""
    result = run_query(query, {})
    if result.width != 1:
        raise QueryError(f"yields {result.width} columns, a fact is one")
    dtype = result.dtypes[0]
    fits = dtype == {"bool": pl.Boolean, "text": pl.String}[unit] if unit in ("bool", "text") else dtype.is_numeric()
    if not fits and dtype != pl.Null:
        raise QueryError(f"yields {str(dtype).lower()}, which is no {unit if unit in ('bool', 'text') else 'number'}")


def measure_query(query: str, unit: Unit, found: dict[str, pl.DataFrame]) -> FactValue:
    """Return the single value of `query` in `unit`; raises NotKnownError where a table that it names is empty, or no value comes out.

    An empty table is no zero: most often it means that this was not recorded.
    """
    for name in find_query_tables(query):
        if name not in found or found[name].is_empty():
            raise NotKnownError(f"this recording has no rows in the table {name!r}")
    result = run_query(query, found)
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


def _explain_error(error: Exception, named: tuple[str, ...]) -> QueryError:
    text = " ".join(str(error).split("Resolved plan until failure")[0].split())
    if unknown := _UNKNOWN_TABLE.search(text):
        return QueryError(f"no table is named {unknown[1]!r}", unknown[1], QUERY_TABLES)
    if unknown := _UNKNOWN_COLUMN.search(text):
        column = unknown[1] or unknown[2]
        known = tuple(dict.fromkeys(item.name for name in named for item in trace.TABLES[name]))
        return QueryError(f"no column is named {column!r}", column, known)
    return QueryError(text.removeprefix("sql parser error: ").split("; valid columns")[0][:300])
