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
    union = spans.merge_spans(array(items))
    assert moments([tuple(pair) for pair in union.tolist()]) == moments(items)
    assert spans.measure_spans(union) == len(moments(items))
    assert (union[1:, 0] > union[:-1, 1]).all()


@given(pairs, pairs)
def test_overlap_counts_common_moments(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    assert spans.measure_overlap(spans.merge_spans(array(a)), spans.merge_spans(array(b))) == len(moments(a) & moments(b))


@given(pairs, pairs)
def test_covered_is_the_part_of_each_interval(a: list[tuple[int, int]], rows: list[tuple[int, int]]) -> None:
    rows = [(start, end) for start, end in rows if end >= start]
    given_rows = array(rows)
    found = spans.measure_covered(spans.merge_spans(array(a)), given_rows[:, 0], given_rows[:, 1])
    assert found.tolist() == [len(moments(a) & moments([row])) for row in rows]


@given(pairs, pairs)
def test_intersect_and_subtract_are_set_operations(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    left, right = spans.merge_spans(array(a)), spans.merge_spans(array(b))
    rest = spans.subtract_spans(left, right)
    both = spans.subtract_spans(left, rest)
    assert moments([tuple(pair) for pair in both.tolist()]) == moments(a) & moments(b)
    assert moments([tuple(pair) for pair in rest.tolist()]) == moments(a) - moments(b)
    for found in (both, rest):  # again sorted, disjoint, not touching: what every function here takes for granted
        assert (found[1:, 0] > found[:-1, 1]).all()


@given(pairs, st.lists(pairs, max_size=4))
def test_partition_counts_every_moment_once_in_order_of_the_layers(
    window: list[tuple[int, int]], layers: list[list[tuple[int, int]]]
) -> None:
    free, expected = moments(window), []
    for layer in layers:
        expected.append(len(free & moments(layer)))
        free -= moments(layer)
    found = spans.partition_window(spans.merge_spans(array(window)), [spans.merge_spans(array(layer)) for layer in layers])
    assert found == [*expected, len(free)]
    assert sum(found) == len(moments(window))


def test_touching_spans_are_one_and_half_open() -> None:
    assert spans.merge_spans(array([(5, 9), (0, 5)])).tolist() == [[0, 9]]
    assert spans.subtract_spans(array([(0, 9)]), array([(3, 5)])).tolist() == [[0, 3], [5, 9]]
    assert spans.subtract_spans(array([(0, 3)]), array([(3, 9)])).tolist() == [[0, 3]]


def test_times_of_today_keep_their_nanoseconds() -> None:
    now = 1_712_345_678_901_234_567  # beyond 2^53: a double would lose the last digits
    assert spans.measure_spans(spans.merge_spans(array([(now, now + 1), (now + 1, now + 3)]))) == 3


@given(st.lists(st.integers(-5, 5)))
def test_distinct_values_stand_in_order(values: list[int]) -> None:
    assert spans.sort_distinct(np.array(values, dtype=np.int64)).tolist() == sorted(set(values))
