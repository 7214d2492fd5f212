"""Steps from marks: contiguous, with gaps, twice, out of order, or none at all."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from handmade import call, kernel, mark, op, steps, trace

from gpudiag.attribution.steps import FROM_MARKS, WHOLE_TRACE, find_steps, step_of

US = 1000


def bounds(*events: dict[str, object]) -> list[tuple[float, float]]:
    table = find_steps(trace(*events)).table
    return [(start / US, end / US) for start, end in table.select("start_ns", "end_ns").iter_rows()]


def test_a_step_reaches_to_the_next_mark() -> None:
    # the profiler's own step() lies between the marks and belongs to the step before
    found = find_steps(trace(mark("ProfilerStep#7", 0, 9), mark("ProfilerStep#8", 10, 19), mark("ProfilerStep#9", 20, 28)))
    assert found.source == FROM_MARKS
    assert found.table.select("name", "start_ns", "end_ns").rows() == [
        ("ProfilerStep#7", 0, 10_000), ("ProfilerStep#8", 10_000, 20_000), ("ProfilerStep#9", 20_000, 28_000),
    ]  # fmt: skip


def test_a_gap_in_the_numbers_is_no_part_of_a_step() -> None:
    assert bounds(mark("ProfilerStep#1", 0, 9), mark("ProfilerStep#5", 50, 60)) == [(0, 9), (50, 60)]


def test_marks_in_any_order_of_the_file() -> None:
    assert bounds(*reversed(steps(0, 10, 25, 30))) == [(0, 10), (10, 25), (25, 30)]


def test_a_second_profiler_around_or_after_the_first_counts_once() -> None:
    nested = [mark(f"ProfilerStep#{row}", 10 * row + 1, 10 * row + 9) for row in range(3)]
    assert bounds(*steps(0, 10, 20, 30, first=0), *nested) == [(0, 10), (10, 20), (20, 30)]
    # its step() is called after the first one's: every mark of it overlaps two of the first
    shifted = [mark(f"ProfilerStep#{row}", 10 * row + 1, 10 * row + 11) for row in range(3)]
    assert bounds(*steps(0, 10, 20, 30, first=0), *shifted) == [(0, 10), (10, 20), (20, 30)]


@pytest.mark.parametrize(("count", "analysed"), [(1, 1), (3, 3), (6, 6), (7, 5), (9, 7)])
def test_edge_steps_are_dropped_only_where_five_remain(count: int, analysed: int) -> None:
    found = find_steps(trace(*steps(*(10 * row for row in range(count + 1)))))
    assert found.table["analysed"].sum() == analysed
    assert bool(found.warnings) == (count < 7)
    if analysed < count:
        assert found.table.filter(~pl.col("analysed"))["id"].to_list() == [0, count - 1]


def test_without_marks_the_whole_trace_is_one_step_and_it_is_said() -> None:
    found = find_steps(trace(op("aten::mm", 5, 9), call(6, 1), kernel(8, 30, 1)))
    assert found.source == WHOLE_TRACE
    assert found.table.select("start_ns", "end_ns", "analysed").rows() == [(5000, 30_000, True)]
    assert len(found.warnings) == 1


def test_a_users_annotation_is_no_step() -> None:
    assert find_steps(trace(mark("my ProfilerStep#3", 0, 10), op("aten::mm", 1, 2))).source == WHOLE_TRACE


def test_step_of_is_half_open_and_null_outside() -> None:
    table = find_steps(trace(mark("ProfilerStep#1", 10, 20), mark("ProfilerStep#2", 20, 30), mark("ProfilerStep#9", 40, 50))).table
    moments = np.array([9999, 10_000, 19_999, 20_000, 30_000, 45_000, 50_000])
    assert step_of(table, moments).to_list() == [None, 0, 0, 1, None, 2, None]
