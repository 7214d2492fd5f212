"""Pieces of time against counting nanoseconds one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.attribution.intervals import Spans, cut_by_layer, fill_pauses, find_most_held, find_outermost, measure_spans, merge_spans

span = st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1]))
spans = st.lists(span, max_size=8).map(lambda rows: np.array(rows, dtype=np.int64).reshape(-1, 2))
unions = spans.map(merge_spans)


def moments(of: Spans) -> set[int]:
    return {t for start, end in of.tolist() for t in range(start, end)}


@given(unions, st.lists(unions, max_size=4))
def test_layers_fill_the_bounds_and_the_first_one_wins(bounds: Spans, layers: list[Spans]) -> None:
    cut = cut_by_layer(bounds, layers)
    assert int((cut.end - cut.start).sum()) == measure_spans(bounds)
    assert (cut.start[1:] >= cut.end[:-1]).all()
    assert all(bounds[row][0] <= start < end <= bounds[row][1] for row, start, end, _ in zip(*cut, strict=True))
    held = [moments(layer) for layer in layers]
    for start, end, layer in zip(cut.start, cut.end, cut.layer, strict=True):
        for t in range(start, end):
            assert layer == next((index for index, inside in enumerate(held) if t in inside), len(layers))


@given(unions, st.lists(unions, min_size=1, max_size=4))
def test_one_more_layer_never_takes_time_from_those_before_it(bounds: Spans, layers: list[Spans]) -> None:
    def sums(number: int) -> Counter[int]:
        cut = cut_by_layer(bounds, layers[:number])
        return Counter({row: int((cut.end - cut.start)[cut.layer == row].sum()) for row in range(number)})

    fewer, more = sums(len(layers) - 1), sums(len(layers))
    assert all(fewer[row] == more[row] for row in fewer)


@given(spans)
def test_of_rows_that_overlap_the_one_that_began_first_has_the_time(rows: Spans) -> None:
    kept, numbers = find_outermost(rows[:, 0], rows[:, 1])
    assert moments(kept) == moments(rows)
    assert int((kept[:, 1] - kept[:, 0]).sum()) == measure_spans(merge_spans(rows))
    for (start, end), number in zip(kept.tolist(), numbers.tolist(), strict=True):
        assert rows[number][0] <= start < end <= rows[number][1]
        assert rows[number][0] == min(first for first, last in rows.tolist() if first <= start < last)


@given(unions, unions, st.data())
def test_the_key_that_holds_most(pieces: Spans, held: Spans, data: st.DataObject) -> None:
    keys = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(held), max_size=len(held))), dtype=np.int64)
    found, time = find_most_held(pieces[:, 0], pieces[:, 1], held, keys)
    for row, (start, end) in enumerate(pieces.tolist()):
        sums: Counter[int] = Counter()
        for (first, last), key in zip(held.tolist(), keys.tolist(), strict=True):
            sums[key] += max(0, min(end, last) - max(start, first))
        most = max(sums.values(), default=0)
        assert time[row] == most
        assert found[row] == -1 if most == 0 else sums[int(found[row])] == most


@given(unions, st.integers(0, 10))
def test_pauses_up_to_the_limit_are_closed(pieces: Spans, close: int) -> None:
    found = fill_pauses(pieces, close)
    assert moments(pieces) <= moments(found)
    assert all(later - earlier > close for earlier, later in zip(found[:-1, 1], found[1:, 0], strict=True))
    assert measure_spans(found) - measure_spans(pieces) <= close * max(len(pieces) - 1, 0)
