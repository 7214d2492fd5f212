"""What is drawn of a row: nothing is lost, nothing is drawn over, and it is as much as there are pixels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.attribution import intervals
from gpudiag.timeline import lanes
from gpudiag.timeline.lanes import BIN_PIXELS, Row, assign_rows, build_row, draw_pieces

Spans = list[tuple[int, int]]


@st.composite
def rows(draw: st.DrawFn) -> tuple[Row, Spans]:
    """Events that do not overlap (some touch, some last no time), and their spans."""
    parts = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 300)), min_size=1, max_size=80))
    at, spans = 0, []
    for gap, length in parts:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    codes = draw(st.lists(st.integers(0, 4), min_size=len(spans), max_size=len(spans)))
    return made(spans, codes), spans


def made(spans: Spans, codes: list[int]) -> Row:
    start, end = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
    ids = np.arange(len(spans), dtype=np.int64)
    return build_row(start, end, np.array(codes, dtype=np.uint8), np.zeros(len(spans), dtype=np.uint8), ids)


@given(rows(), st.integers(-50, 4000), st.integers(1, 6000), st.integers(1, 400))
def test_pieces_hold_every_event_of_the_window_once(made_row: tuple[Row, Spans], start: int, length: int, pixels: int) -> None:
    of, spans = made_row
    inside = [span for span in spans if span[1] > start and span[0] < start + length]
    found = draw_pieces(of, start, start + length, pixels)
    assert int(found.events.sum()) == len(inside)
    assert (found.first[1:] == found.first[:-1] + found.events[:-1]).all()  # one after the other, none twice
    union = intervals.measure_spans(intervals.merge_spans(np.array(inside, dtype=np.int64).reshape(-1, 2)))
    assert int(found.busy_ns.sum()) == union
    for at in range(len(found.events)):
        own = spans[found.first[at] : found.first[at] + found.events[at]]
        assert (found.start_ns[at], found.end_ns[at]) == (own[0][0], own[-1][1])
        assert found.busy_ns[at] == sum(end - begin for begin, end in own)


@given(rows(), st.integers(0, 3000), st.integers(1, 6000), st.integers(1, 400))
def test_no_gap_of_a_bin_is_drawn_over_and_pieces_are_few(made_row: tuple[Row, Spans], start: int, length: int, pixels: int) -> None:
    of, spans = made_row
    width = max(1, lanes.BIN_PIXELS * length // pixels)
    found = draw_pieces(of, start, start + length, pixels)
    for at in range(len(found.events)):
        own = spans[found.first[at] : found.first[at] + found.events[at]]
        gaps = [after[0] - before[1] for before, after in itertools.pairwise(own)]
        assert all(gap < width for gap in gaps)
        assert len(own) == 1 or all(end - begin < width for begin, end in own)  # what is wide enough stands alone
    assert (found.start_ns[1:] >= found.end_ns[:-1]).all()
    bins = length // width + 2
    assert len(found.events) <= 3 * bins + 2


@given(rows())
def test_at_full_zoom_every_event_that_lasts_stands_alone(made_row: tuple[Row, Spans]) -> None:
    of, spans = made_row
    found = draw_pieces(of, spans[0][0] - 1, spans[-1][1] + 1, 2 * BIN_PIXELS * (spans[-1][1] + 2))
    alone = found.events == 1
    assert (found.end_ns[~alone] == found.start_ns[~alone]).all()
    assert (found.code[alone] == of.code[found.first[alone]]).all()


def test_joined_events_are_drawn_as_what_most_of_their_time_is() -> None:
    of = made([(0, 10), (12, 18), (20, 26), (1000, 2000)], [2, 1, 1, 0])
    found = draw_pieces(of, 0, 2000, 40)  # bins of 100 ns
    assert found.code.tolist() == [1, 0]  # 12 ns of kind 1 against 10 of kind 2
    assert found.events.tolist() == [3, 1]
    assert found.busy_ns.tolist() == [22, 1000]


def test_bins_do_not_move_with_the_window() -> None:
    """While somebody pans at one zoom the same events are joined: nothing flickers."""
    random = np.random.default_rng(0)
    edges = np.cumsum(random.integers(1, 40, 4000))
    of = made(list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)), [0] * 2000)
    seen = []
    for start in range(10_000, 10_700, 7):
        found = draw_pieces(of, start, start + 20_000, 400)
        inner = (found.start_ns > 11_000) & (found.end_ns < 29_000)
        seen.append(list(zip(found.first[inner].tolist(), found.events[inner].tolist(), strict=True)))
    assert all(one == seen[0] for one in seen)


def test_a_row_refuses_events_that_overlap() -> None:
    with pytest.raises(ValueError, match="overlap"):
        made([(0, 10), (5, 20)], [0, 0])


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=60))
def test_events_of_one_depth_never_overlap(given_spans: list[tuple[int, int]]) -> None:
    spans = sorted(((begin, begin + length) for begin, length in given_spans), key=lambda span: (span[0], -span[1]))
    start, end = (np.array([span[side] for span in spans], dtype=np.int64) for side in (0, 1))
    found = assign_rows(start, end)
    for depth in set(found.tolist()):
        own = [span for span, at in zip(spans, found.tolist(), strict=True) if at == depth]
        assert all(after[0] >= before[1] for before, after in itertools.pairwise(own))
    # no more rows than events are ever open at once (one of no length counts as 1 ns)
    if spans:
        most = max(sum(begin <= at < max(stop, begin + 1) for begin, stop in spans) for at, _ in spans)
        assert int(found.max()) + 1 == most


def test_the_depth_of_nested_events_is_what_lies_around_them() -> None:
    spans = [(0, 100), (10, 40), (20, 30), (40, 90), (50, 60), (100, 120)]
    start, end = (np.array([span[side] for span in spans], dtype=np.int64) for side in (0, 1))
    assert assign_rows(start, end).tolist() == [0, 1, 2, 1, 2, 0]


def test_a_deep_nesting_that_crosses_takes_no_square_of_time() -> None:
    """200,000 events open at once, the last two crossing: one pass with a heap, not one through all rows for each."""
    many = 200_000
    start = np.arange(many, dtype=np.int64)
    end = 2 * many - start
    end[-1] += 5
    assert assign_rows(start, end).tolist()[-3:] == [many - 3, many - 2, many - 1]
