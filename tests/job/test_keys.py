"""Rows told apart by several columns: against the tuples of their values."""

from __future__ import annotations

from collections import Counter

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.job.message_table import NO_VALUE, build_keys, count_before, find_runs, read_values

FAR = st.sampled_from([NO_VALUE, -(2**62), -3, 0, 1, 2, 2**40, 2**63 - 1])
TABLES = st.integers(1, 5).flatmap(lambda width: st.lists(st.tuples(*[FAR] * width), min_size=1, max_size=40))


@given(TABLES)
def test_keys_are_equal_and_ordered_as_the_rows_are(rows: list[tuple[int, ...]]) -> None:
    found = build_keys(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)).tolist()
    place = {row: number for number, row in enumerate(sorted(set(rows)))}
    assert np.unique(found, return_inverse=True)[1].tolist() == [place[row] for row in rows]


@given(st.lists(st.integers(0, 4), max_size=40))
def test_turns_and_counts_of_equal_keys(given_keys: list[int]) -> None:
    found = find_runs(np.array(given_keys, dtype=np.int64))
    assert count_before(found).tolist() == [given_keys[:place].count(key) for place, key in enumerate(given_keys)]
    assert sorted(found.lengths.tolist()) == sorted(Counter(given_keys).values())
    assert sorted(given_keys) == [given_keys[row] for row in found.order]


def test_null_is_a_value_of_its_own() -> None:
    assert read_values(pl.Series([3, None], dtype=pl.Int8)).tolist() == [3, NO_VALUE]
    words = read_values(pl.Series(["b", None, "b"], dtype=pl.Categorical), -1)
    assert (words[0] == words[2], words[1]) == (True, -1)
