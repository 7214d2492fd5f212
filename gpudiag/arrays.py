"""Columns as arrays: their types, and what is asked of row numbers, where -1 stands for none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


def take_rows(values: npt.NDArray[np.integer[Any]], rows: Ints) -> Ints:
    """Return the values of `rows`, -1 for row -1."""
    found, known = np.full(len(rows), -1, dtype=np.int64), rows >= 0
    found[known] = values[rows[known]]
    return found


def split_groups(keys: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each distinct key, in order, with the places at which it stands."""
    order = np.argsort(keys, kind="stable")
    distinct, begins = np.unique(keys[order], return_index=True)
    yield from zip(distinct.tolist(), np.split(order, begins[1:]), strict=False)


def sort_distinct(values: Ints) -> Ints:
    """Return the distinct values in order. By sorting: np.unique builds a hash table of them since numpy 2.3, 40 x as slow for times."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered
