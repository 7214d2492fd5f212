"""Which consecutive steps are replayed together."""

from __future__ import annotations

import time

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.timeline.graph import LEAST_CONSECUTIVE_STEPS, MAX_NODES, count_events, find_consecutive_steps, split_steps


def _steps(lengths: list[int], analysed: list[bool] | None = None, gap_before: int = -1) -> pl.DataFrame:
    """Return steps of these lengths that touch, but for 5 ns before step `gap_before`."""
    ends = np.cumsum(lengths) + np.where(np.arange(len(lengths)) >= gap_before, 5, 0) * (gap_before >= 0)
    starts = ends - lengths
    return pl.DataFrame({"start_ns": starts, "end_ns": ends, "analysed": analysed or [True] * len(lengths)})


def test_all_analysed_steps_where_they_fit() -> None:
    steps = _steps([10] * 6, [False, *[True] * 4, False])
    assert find_consecutive_steps(steps, np.full(6, 25), most=100) == (1, 4)


def test_else_as_many_as_fit_with_the_mean_of_all() -> None:
    """Ten of 12 steps take 10 ns, the fifth and the last 40: of three in a row those with one slow step are too slow, 15 being the mean."""
    steps = _steps([10, 10, 10, 10, 40, 10, 10, 10, 10, 10, 10, 40])
    assert find_consecutive_steps(steps, np.full(12, 25), most=75) == (0, 2)
    # four in a row with a slow one have a mean of 17.5, those without one of 10
    assert find_consecutive_steps(steps, np.full(12, 25), most=100) == (1, 4)


def test_too_large_steps_are_not_replayed_together() -> None:
    assert find_consecutive_steps(_steps([10] * 5), np.full(5, 25), most=60) is None
    assert find_consecutive_steps(_steps([10, 10]), np.array([25, 25]), most=60) == (0, 1)
    assert find_consecutive_steps(_steps([10]), np.array([70]), most=60) is None


def test_steps_apart_do_not_follow_each_other() -> None:
    assert find_consecutive_steps(_steps([10] * 8, gap_before=3), np.full(8, 1), most=60) == (3, 7)


def test_all_steps_are_split_where_one_is_left_out_or_no_more_fit() -> None:
    steps = _steps([10] * 8, [False, *[True] * 4, False, True, True], gap_before=3)
    assert split_steps(steps, np.full(8, 25), most=100) == [(1, 2), (3, 4), (6, 7)]
    assert split_steps(steps, np.full(8, 25), most=40) == [(1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (7, 7)]
    assert split_steps(steps, np.array([1, 1, MAX_NODES + 1, 1, 1, 1, 1, 1]), most=40) == [(1, 1), (3, 4), (6, 7)]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40), st.booleans()), min_size=1, max_size=12), st.integers(0, 200))
def test_what_is_chosen_is_analysed_touches_and_fits(rows: list[tuple[int, int, bool]], most: int) -> None:
    lengths, counts, analysed = (list(column) for column in zip(*rows, strict=True))
    steps = _steps(lengths, analysed)
    found = find_consecutive_steps(steps, np.array(counts), most)
    if found is None:
        return
    first, last = found
    assert all(analysed[first : last + 1])
    assert sum(counts[first : last + 1]) <= most
    assert last - first + 1 >= min(LEAST_CONSECUTIVE_STEPS, sum(analysed)) or not all(analysed)


@pytest.mark.slow
def test_many_steps_are_chosen_quickly() -> None:
    began = time.perf_counter()
    assert find_consecutive_steps(_steps([10] * 100_000), np.full(100_000, 3), most=150_000) == (0, 49_999)
    assert time.perf_counter() - began < 2


def test_events_count_for_the_step_that_they_begin_in() -> None:
    found = count_events([np.array([0, 9, 10, 35]), np.array([12])], _steps([10, 10, 10]))
    assert found.tolist() == [2, 2, 0]
