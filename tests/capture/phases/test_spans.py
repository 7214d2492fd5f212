"""Phases partition the time of a step: worked examples, and properties over random sequences of events."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gpudiag.capture.phases import PhaseSpans


def cutter() -> tuple[PhaseSpans[int], list[tuple[str, int, int]]]:
    spans: list[tuple[str, int, int]] = []
    return PhaseSpans(lambda *span: spans.append(span), 0), spans


def test_time_before_a_backward_pass_is_forward_and_before_anything_else_nobodys() -> None:
    cut, spans = cutter()
    cut.restart(10)  # a batch
    cut.begin("backward", 0, 30)
    cut.end("backward", 0, 70)
    cut.begin("optimizer", 1, 75)  # 70..75, clipping: nobody's
    cut.end("optimizer", 1, 80)
    cut.cut(95)  # 80..95, logging: nobody's
    assert spans == [("forward", 10, 30), ("backward", 30, 70), ("optimizer", 75, 80)]


def test_a_copy_inside_the_forward_pass_is_taken_out_of_it() -> None:
    cut, spans = cutter()
    cut.insert("h2d", 3, 7)
    cut.begin("backward", 0, 20)
    assert spans == [("h2d", 3, 7), ("forward", 0, 3), ("forward", 7, 20)]


def test_an_open_phase_goes_on_over_a_mark() -> None:
    cut, spans = cutter()
    cut.begin("optimizer", 5, 10)
    cut.cut(20)
    cut.end("optimizer", 5, 22)
    assert spans == [("optimizer", 10, 20), ("optimizer", 20, 22)]


def test_a_phase_that_raised_does_not_swallow_what_follows() -> None:
    cut, spans = cutter()
    assert cut.begin("optimizer", 5, 10)
    assert cut.begin("optimizer", 5, 50)  # the one before never told its end
    assert not cut.begin("optimizer", 6, 55)
    cut.end("optimizer", 5, 60)
    cut.end("optimizer", 6, 99)
    assert spans == [("optimizer", 50, 55), ("optimizer", 55, 60)]


_ACTIONS = st.tuples(
    st.integers(0, 50),
    st.sampled_from(["restart", "cut", "insert", "begin backward", "end backward", "begin optimizer", "end optimizer"]),
    st.integers(0, 2),
)


@given(st.lists(_ACTIONS, max_size=60))
def test_spans_never_overlap_nor_leave_the_time_that_has_passed(actions: list[tuple[int, str, int]]) -> None:
    cut, spans = cutter()
    now = 0
    for wait, action, identity in actions:
        begun, now = now, now + wait
        what, _, phase = action.partition(" ")
        if what == "insert":
            cut.insert("h2d", begun, now)
        elif phase:
            getattr(cut, what)(phase, identity, now)
        else:
            getattr(cut, what)(now)
    ordered = sorted(span[1:] for span in spans if span[2] > span[1])
    assert all(begin <= end for _, begin, end in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ordered))
    assert not ordered or (ordered[0][0] >= 0 and ordered[-1][1] <= now)
    assert sum(end - begin for begin, end in ordered) <= now
