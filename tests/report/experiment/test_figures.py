"""The interval chart."""

from __future__ import annotations

import itertools
import json
import math
import re

import outcomes as made
import plotly.graph_objects as go
import pytest
import report_sample as sample
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.model.experiment import Pair
from gpudiag.report.experiment.intervals import choose_ticks, compute_pair_ratios, draw_intervals, thin_ticks


def test_plotly_accepts_the_figure() -> None:
    figure = draw_intervals(made.every_verdict())
    assert figure is not None
    drawn = go.Figure(figure)  # validates every property
    names = {trace.name for trace in drawn.data}
    assert names == {"each process pair", "proved faster", "parity differs", "slower", "nothing proved", "upper bound"}
    json.dumps(figure)


def test_a_change_stands_at_its_ratio_with_its_interval_pairs_and_promise() -> None:
    figure = draw_intervals((made.outcome(),))
    assert figure is not None
    traces = {trace["name"]: trace for trace in figure["data"]}
    point = traces["proved faster"]
    assert point["x"] == [1.83]
    assert point["x"][0] + point["error_x"]["array"][0] == pytest.approx(1.87)
    assert point["x"][0] - point["error_x"]["arrayminus"][0] == pytest.approx(1.79)
    assert traces["each process pair"]["x"] == pytest.approx([1.80, 1.82, 1.83, 1.83, 1.84, 1.86])
    assert traces["upper bound"]["x"] == pytest.approx([2.0])  # half the time: twice as fast
    low, high = figure["layout"]["xaxis"]["range"]
    assert 10**low < 1 < 1.87 < 2.0 < 10**high


def test_the_ratio_of_a_pair_is_the_median_of_its_blocks() -> None:
    assert compute_pair_ratios([made.pair(1.5)]) == pytest.approx([1.5])  # the disturbed block has no say
    empty = made.pair(1.5, blocks=0)
    assert compute_pair_ratios([empty]) == []
    far = (Pair((1e-300,), (1e300,), "samples"), Pair((1e300,), (1e-300,), "samples"), Pair((1e-9,), (1.0,), "samples"))
    assert compute_pair_ratios(far) == pytest.approx([1000])


def test_a_promise_far_away_does_not_make_the_intervals_small() -> None:
    figure = draw_intervals((made.outcome(ratio=1.05, interval=(1.03, 1.07), ceiling_share=0.9, measured=()),))
    assert figure is not None
    assert 10 ** figure["layout"]["xaxis"]["range"][1] < 2


@pytest.mark.parametrize("ratio", [1e-300, 1e-9, 5e5, 1e12, 1e300])
def test_a_ratio_that_no_training_has_costs_neither_time_nor_memory(ratio: float) -> None:
    figure = draw_intervals((made.outcome(ratio=ratio, interval=(ratio / 2, ratio * 2), ceiling_share=1 - 2**-53), made.outcome()))
    assert figure is not None
    axis = figure["layout"]["xaxis"]
    assert len(axis["tickvals"]) <= 10
    assert -4 < axis["range"][0] < 0 < axis["range"][1] < 4


def test_the_rows_are_named_from_top_to_bottom_and_names_are_escaped() -> None:
    figure = draw_intervals(made.hostile(sample.HOSTILE).experiments)
    assert figure is not None
    axis = figure["layout"]["yaxis"]
    assert axis["tickvals"] == sorted(axis["tickvals"], reverse=True)
    shown = " ".join([*axis["ticktext"], *(text for trace in figure["data"] for text in trace.get("text", []))])
    assert set(re.findall(r"<\s*/?\s*(\w+)", shown)) <= {"b", "br"}


def test_without_a_ratio_there_is_no_chart() -> None:
    assert draw_intervals((made.plain("x", verdict="failed"), made.plain("y", verdict="not_applied"))) is None
    assert draw_intervals(()) is None


@given(st.floats(0.0006, 0.98), st.floats(1.02, 1700))
def test_ticks_are_few_round_and_hold_1(low: float, high: float) -> None:
    found = choose_ticks(low, high)
    assert 1.0 in found
    assert len(found) <= 10
    assert all(low - 1e-6 <= value <= high + 1e-6 for value in found)
    assert all(math.isclose(value, float(f"{value:.4g}")) for value in found)


@given(st.floats(0.0006, 0.98), st.floats(1.02, 1700))
def test_labels_of_ticks_have_room_beside_each_other(low: float, high: float) -> None:
    found = thin_ticks(choose_ticks(low, high), low, high)
    assert 1.0 in found
    assert set(found) <= set(choose_ticks(low, high))
    room = math.log(high / low) / 8
    assert all(math.log(after / before) >= room for before, after in itertools.pairwise(found))
