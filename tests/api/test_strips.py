"""Lines of a few hundred points keep what matters: ends, extremes, holes, and how long a reason held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from growingbundle import START_NS, STEP_NS, Bundle
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.recordings.live import GrowingRecording, RecordedSoFar
from gpudiag.report import telemetry_chart

SECOND = 10**9


def recorded(path: Path, *, steps: int = 0, times: list[int] | None = None, **columns: list[float]) -> RecordedSoFar:
    bundle = Bundle(path / "run")
    if steps:
        bundle.steps(steps)
    if times:
        bundle.samples(times, **columns)
    return GrowingRecording(bundle.path).read()


def test_a_sample_lies_at_its_step(tmp_path: Path) -> None:
    now = recorded(tmp_path, steps=10, times=[-STEP_NS, 0, STEP_NS * 3 // 2, STEP_NS * 10 + 1], power_w=[9.0, 1.0, 2.0, 9.0])
    axis = telemetry_chart.ChartAxis("step", now.telemetry, now.steps)
    line = telemetry_chart.build_sample_line(now.telemetry, "power_w", axis)
    assert line is not None
    assert (line.x, line.mean) == ([0.0, 1.5], [1.0, 2.0])  # before the first step and after the last lies nothing
    assert axis.span(now.telemetry) == (0.0, 10.0)


def test_without_steps_the_axis_is_time(tmp_path: Path) -> None:
    now = recorded(tmp_path, times=[0, 2 * SECOND], power_w=[1.0, 2.0])
    axis = telemetry_chart.ChartAxis("step", now.telemetry, now.steps)
    line = telemetry_chart.build_sample_line(now.telemetry, "power_w", axis)
    assert axis.kind == "time"
    assert axis.span(now.telemetry) == (0.0, 2.0)
    assert line is not None
    assert line.x == [0.0, 2.0]


def test_a_hole_breaks_the_line(tmp_path: Path) -> None:
    times = [k * SECOND // 10 for k in range(30)]
    times += [60 * SECOND + time for time in times]
    now = recorded(tmp_path, times=times, power_w=[100.0] * 60)
    line = telemetry_chart.build_sample_line(now.telemetry, "power_w", telemetry_chart.ChartAxis("time", now.telemetry, now.steps))
    assert line is not None
    assert line.mean.count(None) == 1
    assert line.mean.index(None) == 30


def test_what_cannot_be_is_left_out(tmp_path: Path) -> None:
    now = recorded(tmp_path, times=[0, 1, 2, 3], power_w=[100.0, float("nan"), -5.0, 1e12], temperature_c=[None] * 4)
    axis = telemetry_chart.ChartAxis("time", now.telemetry, now.steps)
    line = telemetry_chart.build_sample_line(now.telemetry, "power_w", axis)
    assert line is not None
    assert line.mean == [100.0]
    assert telemetry_chart.build_sample_line(now.telemetry, "temperature_c", axis) is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1000, allow_nan=False), min_size=1, max_size=600), st.integers(1, 50))
def test_thinning_keeps_extremes_mean_and_order(values: list[float], bins: int) -> None:
    x = np.cumsum(np.linspace(0.1, 2.0, len(values)))
    line = telemetry_chart._thin_points(x, np.asarray(values), np.zeros(len(values), dtype=np.bool_), bins)
    low, high, mean = ([value for value in row if value is not None] for row in (line.low, line.high, line.mean))
    assert (min(low), max(high)) == (min(values), max(values))
    assert all(lowest <= middle + 1e-9 and middle <= highest + 1e-9 for lowest, middle, highest in zip(low, mean, high, strict=True))
    assert line.x == sorted(line.x)
    assert x[0] <= line.x[0] <= line.x[-1] <= x[-1]
    assert line.samples == len(values)
    assert len(line.x) <= (bins if line.thinned else 2 * bins)


@pytest.mark.slow
def test_a_long_run_is_a_few_hundred_points(tmp_path: Path) -> None:
    now = recorded(tmp_path, steps=20_000)
    axis = telemetry_chart.ChartAxis("step", now.telemetry, now.steps)
    line = telemetry_chart.build_step_line(now.steps, "wall_ns", axis)
    assert line is not None
    assert line.thinned
    assert len(line.x) == telemetry_chart.BINS
    assert set(line.mean) == {100.0}
    assert telemetry_chart.build_step_line(now.steps, "loader_wait_ns", axis) is None


def test_profiled_steps_are_stretches(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path / "run")
    for count, window in ((5, "plain"), (3, "timing"), (2, "plain"), (1, "sites")):
        bundle.steps(count, window=window)
    now = GrowingRecording(bundle.path).read()
    by_step = telemetry_chart.list_profiled_spans(now.steps, telemetry_chart.ChartAxis("step", now.telemetry, now.steps))
    assert by_step == [(5.0, 8.0, "timing"), (10.0, 11.0, "sites")]
    by_time = telemetry_chart.list_profiled_spans(now.steps, telemetry_chart.ChartAxis("time", now.telemetry, now.steps))
    assert [window for *_, window in by_time] == ["timing", "sites"]
    assert [value for start, end, _ in by_time for value in (start, end)] == pytest.approx([0.5, 0.8, 1.0, 1.1])


def test_reasons_hold_as_long_as_their_samples(tmp_path: Path) -> None:
    """The power cap holds in the second half, and an idle GPU is no reason that lowers the clocks."""
    times = [k * SECOND // 10 for k in range(101)]
    masks = [0x1 if k < 50 else 0x4 for k in range(101)]
    now = recorded(tmp_path, times=times, clock_event_reasons=masks)
    edges, found = telemetry_chart.measure_clock_reasons(
        now.telemetry, telemetry_chart.ChartAxis("time", now.telemetry, now.steps), bins=10
    )
    assert [(reason.name, reason.lowers, round(reason.share, 3)) for reason in found] == [
        ("SW Power Cap", True, 0.5),
        ("GPU Idle", False, 0.5),
    ]
    assert (edges[0], edges[-1], len(edges)) == (0.0, 10.0, 11)
    assert found[0].shares == pytest.approx([0.0] * 5 + [1.0] * 5)


def test_nothing_is_said_of_a_hole(tmp_path: Path) -> None:
    times = [0, SECOND, 2 * SECOND, 90 * SECOND, 91 * SECOND]
    now = recorded(tmp_path, times=times, clock_event_reasons=[0x20] * 5)
    _, found = telemetry_chart.measure_clock_reasons(now.telemetry, telemetry_chart.ChartAxis("time", now.telemetry, now.steps), bins=91)
    assert found[0].shares[40] is None
    assert found[0].shares[0] == pytest.approx(1.0)
    assert found[0].share == pytest.approx(1.0)


def test_a_clock_that_was_set_back_does_not_fold_the_axis(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path / "run")
    bundle.steps(3)
    bundle._now_ns -= 10 * STEP_NS
    bundle.steps(3)
    now = GrowingRecording(bundle.path).read()
    places = telemetry_chart.ChartAxis("step", now.telemetry, now.steps).at(np.arange(START_NS, START_NS + 3 * STEP_NS, STEP_NS // 2))
    known = places[~np.isnan(places)]
    assert (np.diff(known) >= 0).all()
