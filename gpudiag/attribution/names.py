"""Names are categories: what is asked of their text is asked once for each distinct name, not of each of a million rows."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import polars as pl

from gpudiag.arrays import Bools

FEW_ROWS = 1000
"""Up to here the text of all rows costs less than the queries that find which names are distinct (50 to 250 us against 230)."""


def mask_names(names: pl.Series, pattern: str) -> Bools:
    """Return which of `names` match `pattern`, False for none."""
    found: Bools = match_names(names, pattern).fill_null(False).to_numpy()
    return found


def match_names(names: pl.Series, pattern: str) -> pl.Series:
    """Mark which of `names` match `pattern`, null for none."""
    if names.null_count() == len(names):  # to compile a pattern takes longer than the rest
        return pl.Series(names.name, [None] * len(names), dtype=pl.Boolean)
    return map_distinct(names, lambda distinct: distinct.str.contains(pattern))


def match_any_of(names: pl.Series, wanted: Collection[str]) -> pl.Series:
    """Mark which of `names` are one of `wanted`, null for none."""
    return map_distinct(names, lambda distinct: distinct.is_in(list(wanted)))


def decode_names(names: pl.Series) -> pl.Series:
    """Return `names` as text. Rows of one name share its characters: a cast writes them out for each row, and kernels have long names."""
    return map_distinct(names, lambda distinct: distinct)


def decode_column(column: str) -> pl.Expr:
    """Return the names of `column` as text (see texts)."""
    return pl.col(column).map_batches(decode_names, return_dtype=pl.String)


def match_column(column: str, pattern: str) -> pl.Expr:
    """Mark which names of `column` match `pattern`, null for none."""
    return pl.col(column).map_batches(lambda names: match_names(names, pattern), return_dtype=pl.Boolean)


def map_distinct(names: pl.Series, ask: Callable[[pl.Series], pl.Series]) -> pl.Series:
    """Return what `ask` says of the text of each name; null for none."""
    if len(names) <= FEW_ROWS or not isinstance(names.dtype, pl.Categorical) or names.null_count() == len(names):
        return ask(names.cast(pl.String))
    rows = names.to_physical()
    known = np.flatnonzero(rows.is_not_null().to_numpy()) if rows.null_count() else np.arange(len(rows), dtype=np.uint32)
    codes = rows.drop_nulls().to_numpy()
    example = np.zeros(int(codes.max()) + 1, dtype=np.uint32)
    example[codes] = known  # a row that bears the name
    named = np.bincount(codes) > 0
    distinct = names.gather(example[named])
    place = np.cumsum(named, dtype=np.uint32) - named
    result: pl.Series = ask(distinct.cast(pl.String)).gather(place).gather(rows).alias(names.name)  # of each code, then of each row
    return result
