"""The tree of the ops against a search by brute force, and the cases that real files hold."""

from __future__ import annotations

from unittest import mock

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.attribution import nesting
from gpudiag.attribution.nesting import Nesting, find_innermost, find_nearest, find_self_spans, mark_ancestors, measure_self_ns, nest

Row = tuple[int, int, int]  # thread, start, end


def tree(rows: list[Row]) -> Nesting:
    frame = pl.DataFrame(rows, schema={"thread": pl.Int64, "start_ns": pl.Int64, "end_ns": pl.Int64}, orient="row")
    return nest(frame.sort("thread", "start_ns", "end_ns", descending=[False, False, True], maintain_order=True))


# Noise: children may end after their parents, start together, have no length.
rows = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 25)).map(lambda row: (row[0], row[1], row[1] + row[2])), max_size=14
)


@given(rows)
def test_cut_ops_of_a_thread_are_nested_or_apart(items: list[Row]) -> None:
    found = tree(items)
    for a in range(len(items)):
        parent = found.parent[a]
        if parent >= 0:
            assert found.thread[parent] == found.thread[a]
            assert found.start_ns[parent] <= found.start_ns[a] <= found.end_ns[a] <= found.end_ns[parent]
        for b in range(a):
            apart = found.end_ns[b] <= found.start_ns[a] or found.thread[a] != found.thread[b]
            assert apart or found.end_ns[a] <= found.end_ns[b]


@given(rows)
def test_self_times_sum_to_the_busy_time_of_each_thread_and_the_spans_hold_them(items: list[Row]) -> None:
    found = tree(items)
    own = measure_self_ns(found)
    assert (own >= 0).all()
    for thread in range(3):
        busy = {t for row in range(len(items)) if found.thread[row] == thread for t in range(found.start_ns[row], found.end_ns[row])}
        assert own[found.thread == thread].sum() == len(busy)
    owner, spans = find_self_spans(found)
    lengths = np.bincount(owner, weights=spans[:, 1] - spans[:, 0], minlength=len(items)) if len(items) else np.empty(0)
    assert lengths.tolist() == own.tolist()


@given(rows, st.booleans())
def test_columns_and_the_stack_agree(items: list[Row], within: bool) -> None:
    if within:  # of each thread every row lies in the one before it: nothing is cut
        items = [(thread, 50 - length, 50 + length) for thread, _, length in items]
    by_stack = tree(items)
    with mock.patch.object(nesting, "FEW_ROWS", 0), mock.patch.object(nesting, "BLOCK_ROWS", 3):
        in_columns = tree(items)
        in_blocks = find_self_spans(in_columns)
    for one, other in zip(find_self_spans(by_stack), in_blocks, strict=True):
        assert one.tolist() == other.tolist()
    for one, other in zip(by_stack, in_columns, strict=True):
        assert one.tolist() == other.tolist()


def test_in_columns_only_an_op_that_reaches_into_what_follows_sends_a_thread_to_the_stack() -> None:
    starts, ends = np.arange(0, 1000, 10), np.arange(0, 1000, 10) + 8
    starts, ends = np.concatenate(([0], np.repeat(starts, 2))), np.concatenate(([1000], np.repeat(ends, 2)))
    found = nesting._nest_in_columns(starts, ends)
    assert found is not None
    assert found[0][:5].tolist() == [-1, 0, 1, 0, 3]
    noisy = ends.copy()
    noisy[[100, 199, 200]] += [1, 4, 4]  # later than their parents, and nothing begins before that; the last two end the recording
    cut = nesting._nest_in_columns(starts, noisy)
    assert cut is not None
    assert cut[0].tolist() == found[0].tolist()
    assert cut[1].tolist() == [*ends[:199].tolist(), 1000 - 2 + 2, 1000 - 2 + 2]
    noisy[100] += 2  # into the next op
    assert nesting._nest_in_columns(starts, noisy) is None


def test_the_frames_of_a_whole_stack_that_end_a_little_late_are_cut_to_the_outermost() -> None:
    deep = nesting.FEW_ROWS * 2
    starts, ends = np.arange(deep), np.full(deep, 10**6) + np.minimum(np.arange(deep), 40)
    found = nesting._nest_in_columns(starts, ends)
    assert found is not None
    assert found[0].tolist() == list(range(-1, deep - 1))
    assert set(found[1].tolist()) == {10**6}


def test_pieces_that_meet_the_asked_spans() -> None:
    found = tree([(0, 0, 100), (0, 40, 60), (1, 0, 50)])
    rows, spans = find_self_spans(found, np.array([[60, 70]]))
    assert rows.tolist() == [0]
    assert spans.tolist() == [[60, 100]]


@given(rows, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 70)), max_size=8))
def test_innermost_is_the_op_that_started_last_of_those_open(items: list[Row], moments: list[tuple[int, int]]) -> None:
    found = tree(items)
    threads, times = np.array([m[0] for m in moments], dtype=np.int64), np.array([m[1] for m in moments], dtype=np.int64)
    for (thread, time), row in zip(moments, find_innermost(found, threads, times).tolist(), strict=True):
        started = [r for r in range(len(items)) if found.thread[r] == thread and found.start_ns[r] <= time]
        still_open = [r for r in started if found.end_ns[r] > time]
        if row < 0:
            assert not still_open
        else:
            assert row in started
            assert found.end_ns[row] >= time
            assert not still_open or row >= max(still_open)


def test_a_child_that_ends_after_its_parent_is_cut() -> None:
    found = tree([(0, 0, 100), (0, 40, 103), (0, 50, 60)])
    assert found.parent.tolist() == [-1, 0, 1]
    assert found.end_ns.tolist() == [100, 100, 60]
    assert measure_self_ns(found).tolist() == [40, 50, 10]


def test_of_equal_starts_the_longer_is_the_parent_and_equal_ops_nest_in_file_order() -> None:
    assert tree([(0, 0, 5), (0, 0, 9), (0, 0, 9)]).parent.tolist() == [-1, 0, 1]


def test_an_op_that_starts_when_another_ends_is_its_sibling() -> None:
    assert tree([(0, 0, 10), (0, 2, 5), (0, 5, 9), (0, 10, 11)]).parent.tolist() == [-1, 0, 0, -1]


def test_a_launch_at_the_very_end_of_an_op_is_inside() -> None:
    found = tree([(0, 0, 10), (0, 4, 8)])
    assert find_innermost(found, np.array([0, 0, 0, 1]), np.array([8, 10, 11, 5])).tolist() == [1, 0, -1, -1]


def test_no_ops_at_all() -> None:
    found = tree([])
    assert find_innermost(found, np.array([0]), np.array([5])).tolist() == [-1]
    assert find_self_spans(found)[1].shape == (0, 2)


@given(st.lists(st.tuples(st.integers(-1, 30), st.booleans()), max_size=20))
def test_nearest_climbs_to_the_first_wanted_row(items: list[tuple[int, bool]]) -> None:
    parent = np.array([min(above, row - 1) for row, (above, _) in enumerate(items)], dtype=np.int64)
    wanted = np.array([chosen for _, chosen in items], dtype=bool)
    for row, found in enumerate(find_nearest(parent, wanted).tolist()):
        while row >= 0 and not wanted[row]:
            row = int(parent[row])
        assert found == row


@given(st.lists(st.integers(-1, 30), max_size=20), st.lists(st.integers(-1, 19), max_size=30))
def test_rows_with_parents_are_those_that_climbing_from_each_meets(above: list[int], asked: list[int]) -> None:
    parent = np.array([min(holder, row - 1) for row, holder in enumerate(above)], dtype=np.int64)
    rows = np.array([row for row in asked if row < len(above)], dtype=np.int64)
    met = set()
    for row in rows.tolist():
        while row >= 0:
            met.add(row)
            row = int(parent[row])
    assert set(np.flatnonzero(mark_ancestors(parent, rows)).tolist()) == met


@pytest.mark.slow
def test_ops_nested_as_deep_as_the_file_is_long_cost_no_square() -> None:
    depth = 200_000
    found = tree([(0, row, 2 * depth - row) for row in range(depth)])
    assert found.parent.tolist() == list(range(-1, depth - 1))
    assert measure_self_ns(found).sum() == 2 * depth
    wanted = np.zeros(depth, dtype=bool)
    wanted[0] = True
    assert (find_nearest(found.parent, wanted) == 0).all()  # one level at a time would be 2e10 steps here
    assert mark_ancestors(found.parent, np.full(2, depth - 1)).all()


def test_looking_up_moments_in_such_a_file_costs_no_square_either() -> None:
    depth = 200_000
    found = tree([(0, row, 2 * depth - row) for row in range(depth)])
    times = np.arange(depth, 2 * depth)  # at each moment one more op has ended; its end still counts as inside
    assert find_innermost(found, np.zeros(depth, dtype=np.int64), times).tolist() == [min(2 * depth - t, depth - 1) for t in times.tolist()]
    rows, spans = find_self_spans(found)
    assert sorted(rows.tolist()) == sorted([*range(depth), *range(depth - 1)])  # before and after the op inside; the last has one piece
    assert int((spans[:, 1] - spans[:, 0]).sum()) == 2 * depth


@pytest.mark.slow
def test_as_many_threads_as_ops_cost_no_square() -> None:
    count = 100_000
    found = tree([(thread, thread, thread + 5) for thread in range(count)])
    threads = np.arange(count)[::-1]
    assert (find_innermost(found, threads, threads + 2) == threads).all()
    assert (find_innermost(found, threads, threads + 6) == -1).all()
