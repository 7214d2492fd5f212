"""Rows told apart by several columns of whole numbers, as one number a row: sorting that is far cheaper than grouping by all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

Ints = npt.NDArray[np.int64]

Whole = npt.NDArray[np.signedinteger[Any]]
"""Whole numbers of any size."""

NONE = int(np.iinfo(np.int64).min)
"""Stands for null."""

_NEAR = 1 << 20
"""Values within so many of each other are numbered by their distance from the least one, others by their order."""

_MOST = 1 << 62


class Runs(NamedTuple):
    """Rows with equal keys."""

    order: Ints
    """Rows by key, those of one key in their own order."""
    starts: Ints
    """Where in `order` each distinct key begins."""
    lengths: Ints


def values(column: pl.Series | Whole, none: int = NONE) -> Ints:
    """Return whole numbers, or codes of categories, as int64; `none` for null."""
    if not isinstance(column, pl.Series):
        return column.astype(np.int64, copy=False)
    if isinstance(column.dtype, pl.Categorical):
        column = column.to_physical()
    found: Ints = column.cast(pl.Int64).fill_null(none).to_numpy()
    return found


def keys(columns: Iterable[Ints]) -> Ints:
    """Return a number for each row: equal where all `columns` are, and in their order. They are asked for one after the other."""
    found, span = np.zeros(1, dtype=np.int64), 1
    for column in columns:
        numbers, more = _numbered(column)
        if span * more >= _MOST:
            found, span = _by_order(found)
        found = found * more + numbers
        span *= more
    return found


def _numbered(column: Ints) -> tuple[Ints, int]:
    """Return numbers from 0 in the order of the values, and how many there may be."""
    if not len(column):
        return column, 1
    least, most = int(column.min()), int(column.max())
    return (column - least, most - least + 1) if most - least < _NEAR else _by_order(column)


def _by_order(column: Ints) -> tuple[Ints, int]:
    distinct, place = np.unique(column, return_inverse=True)
    return place.astype(np.int64, copy=False), len(distinct)


def runs(key: Ints) -> Runs:
    """Return the rows of each distinct value of `key`."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(key) else np.empty(0, dtype=np.int64)
    return Runs(order, starts, np.diff(np.append(starts, len(key))))


def turns(found: Runs) -> Ints:
    """Return of each row how many rows of the same key come before it."""
    turn = np.empty(len(found.order), dtype=np.int64)
    turn[found.order] = np.arange(len(found.order)) - np.repeat(found.starts, found.lengths)
    return turn


def counts(found: Runs) -> Ints:
    """Return of each row how many rows have its key."""
    count = np.empty(len(found.order), dtype=np.int64)
    count[found.order] = np.repeat(found.lengths, found.lengths)
    return count
