"""Bars of characters: on one axis, never telling more than the interval."""

from __future__ import annotations

import outcomes as made
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.model.experiment import Outcome
from gpudiag.report.experiment.intervals import Axis


def found(ratio: float, low: float, high: float) -> Outcome:
    return made.plain("x", verdict="inconclusive", ratio=ratio, interval=(low, high), pairs=4)


def test_an_interval_with_its_middle_and_1() -> None:
    axis = Axis([found(2.0, 1.5, 2.5)], 41)
    bar = axis.bar(found(2.0, 1.5, 2.5))
    assert bar.index("|") == 1  # the axis begins 2 % below 1
    assert bar.index("|") < bar.index("(") < bar.index("o") < bar.index(")") == 40
    assert set(bar[bar.index("(") + 1 : bar.index(")")]) == {"=", "o"}


def test_what_lies_beyond_the_axis_is_cut_and_says_so() -> None:
    wide = found(1.1, 0.01, 90.0)
    bar = Axis([wide], 30).bar(wide)
    assert (bar[0], bar[-1]) == ("<", ">")


def test_without_a_ratio_there_is_no_bar() -> None:
    failed = made.plain("x", verdict="failed")
    assert Axis([failed], 30).bar(failed) == ""


@given(st.lists(st.tuples(st.floats(0.01, 50), st.floats(0, 0.9), st.floats(0, 5)), min_size=1, max_size=5), st.integers(0, 60))
def test_every_bar_has_the_width_of_the_axis_and_its_middle(rows: list[tuple[float, float, float]], cells: int) -> None:
    outcomes = [found(ratio, ratio * (1 - below), ratio * (1 + above)) for ratio, below, above in rows]
    axis = Axis(outcomes, cells)
    for outcome in outcomes:
        bar = axis.bar(outcome)
        assert len(bar) == axis.cells
        assert bar.count("o") == 1
        assert bar.isascii()
