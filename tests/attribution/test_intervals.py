"""Spans against sets of integers: every nanosecond counted by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.attribution import intervals as spans

pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def moments(items: list[tuple[int, int]]) -> set[int]:
    return {t for start, end in items for t in range(start, end)}


def array(items: list[tuple[int, int]]) -> np.ndarray:
    return np.array(items, dtype=np.int64).reshape(-1, 2)


@given(pairs)
def test_union_covers_the_same_moments_and_is_disjoint_and_sorted(items: list[tuple[int, int]]) -> None:
    union = spans.union(array(items))
    assert moments([tuple(pair) for pair in union.tolist()]) == moments(items)
    assert spans.total(union) == len(moments(items))
    assert (union[1:, 0] > union[:-1, 1]).all()


@given(pairs, pairs)
def test_overlap_counts_common_moments(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    assert spans.overlap(spans.union(array(a)), spans.union(array(b))) == len(moments(a) & moments(b))


@given(pairs, pairs)
def test_covered_is_the_part_of_each_interval(a: list[tuple[int, int]], rows: list[tuple[int, int]]) -> None:
    rows = [(start, end) for start, end in rows if end >= start]
    given_rows = array(rows)
    found = spans.covered(spans.union(array(a)), given_rows[:, 0], given_rows[:, 1])
    assert found.tolist() == [len(moments(a) & moments([row])) for row in rows]
