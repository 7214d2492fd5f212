"""Telemetry and step times as lines of a few hundred points: what a chart of a run draws, however long the run was."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.capture.telemetry.readings import MAX_PLAUSIBLE
from gpudiag.model.hardware import CLOCK_EVENTS
from gpudiag.timeline.telemetry import estimate_hold_ns

BINS = 400
"""Points of a line: as many as a screen shows side by side. Twice as many samples are drawn one by one."""

AxisKind = Literal["step", "time"]
Numbers = npt.NDArray[np.float64]
Times = npt.NDArray[np.int64]


class ChartLine(NamedTuple):
    """A column over the axis. None in `mean`: a hole, over which no line is drawn."""

    x: list[float]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]
    samples: int
    thinned: bool
    """Whether a point stands for several samples: their mean, lowest and highest."""


class ClockReason(NamedTuple):
    """How much of each bin a reason for the clocks held."""

    name: str
    lowers: bool
    shares: list[float | None]
    share: float


class ChartAxis:
    """What stands below the lines: seconds since the run began, or steps (a moment within step 7 lies between 7 and 8)."""

    def __init__(self, kind: AxisKind, telemetry: pl.DataFrame, steps: pl.DataFrame) -> None:
        self.kind: AxisKind = kind if steps.height else "time"
        starts = steps["start_unix_ns"].to_numpy()
        firsts = [int(times[0]) for times in (telemetry["t_ns"].to_numpy(), starts) if len(times)]
        self._begin = min(firsts, default=0)
        ends = starts + steps["wall_ns"].to_numpy()
        # a clock that was set back within a run must not fold the axis
        self._moments = np.maximum.accumulate(self._since(np.append(starts, ends[-1:]))) if len(starts) else np.empty(0)
        numbers = steps["step"].to_numpy()
        self._numbers = np.append(numbers, numbers[-1:] + 1).astype(np.float64)

    def _since(self, moments: Times) -> Numbers:
        """Return ns since the beginning: a Unix time in ns as a float would be 256 ns off."""
        return (moments - self._begin).astype(np.float64)

    def at(self, moments: Times) -> Numbers:
        """Return where Unix times (ns) lie; NaN before the first step and after the last on an axis of steps."""
        if self.kind == "time":
            return self._since(moments) / 1e9
        return np.asarray(np.interp(self._since(moments), self._moments, self._numbers, left=np.nan, right=np.nan))

    def span(self, telemetry: pl.DataFrame) -> tuple[float, float]:
        """Return both ends of the axis."""
        if self.kind == "step":
            return float(self._numbers[0]), float(self._numbers[-1])
        latest = [*self._since(telemetry["t_ns"].tail(1).to_numpy()).tolist(), *self._moments[-1:].tolist()]
        return 0.0, max(latest, default=0.0) / 1e9


def build_sample_line(telemetry: pl.DataFrame, name: str, axis: ChartAxis) -> ChartLine | None:
    """Build the samples of a column that can be; None where there is none on the axis."""
    known = telemetry.select("t_ns", pl.col(name).cast(pl.Float64)).drop_nulls()
    known = known.filter(pl.col(name).is_between(0, MAX_PLAUSIBLE.get(name, float("inf"))) & pl.col(name).is_finite())
    times, values = known["t_ns"].to_numpy(), known[name].to_numpy()
    x = axis.at(times)
    on = ~np.isnan(x)
    if not on.any():
        return None
    times, values, x = times[on], values[on], x[on]
    holes = np.append(np.diff(times) > estimate_hold_ns(times)[:-1], False)
    return _thin_points(x, values, holes)


def build_step_line(steps: pl.DataFrame, name: str, axis: ChartAxis) -> ChartLine | None:
    """Build a column of times of the steps in ms; None where no step has it."""
    known = steps.select("start_unix_ns", "step", pl.col(name).cast(pl.Float64) / 1e6).drop_nulls()
    if known.is_empty():
        return None
    x = known["step"].to_numpy().astype(np.float64) if axis.kind == "step" else axis.at(known["start_unix_ns"].to_numpy())
    return _thin_points(x, known[name].to_numpy(), np.zeros(known.height, dtype=np.bool_))


def _thin_points(x: Numbers, values: Numbers, holes: npt.NDArray[np.bool_], bins: int = BINS) -> ChartLine:
    """Return one point for each bin that has samples; each sample by itself where they are few. `holes`: after which samples."""
    order = np.argsort(x, kind="stable")
    x, values, holes = x[order], values[order], holes[order]
    thinned = len(x) > 2 * bins
    width = (x[-1] - x[0]) / bins if thinned else 0.0
    numbers = np.minimum(((x - x[0]) / width).astype(np.int64), bins - 1) if width > 0 else np.arange(len(x))
    first = np.concatenate(([0], np.flatnonzero(np.diff(numbers)) + 1))
    last = np.append(first[1:], len(x)) - 1
    count = last - first + 1
    middle = np.add.reduceat(x, first) / count
    rows = np.add.reduceat(values, first) / count, np.minimum.reduceat(values, first), np.maximum.reduceat(values, first)
    after = np.flatnonzero(holes[last][:-1]) + 1  # a point without a value after each hole
    places: list[float] = np.insert(middle, after, middle[after]).tolist()
    mean, low, high = ([None if np.isnan(value) else float(value) for value in np.insert(row, after, np.nan)] for row in rows)
    return ChartLine(places, mean, low, high, len(values), thinned)


def list_profiled_spans(steps: pl.DataFrame, axis: ChartAxis) -> list[tuple[float, float, str]]:
    """List the stretches of steps that were recorded: begin, end on the axis, and which window ('timing', 'sites', ...)."""
    chosen = steps.filter(pl.col("window").is_in(["timing", "sites", "export"])).sort("step")
    found: list[tuple[float, float, str]] = []
    for number, start, wall, window in chosen.select("step", "start_unix_ns", "wall_ns", "window").iter_rows():
        ends = (float(number), number + 1.0) if axis.kind == "step" else tuple(axis.at(np.asarray([start, start + wall], dtype=np.int64)))
        if found and found[-1][2] == window and abs(found[-1][1] - ends[0]) < 1e-3:
            found[-1] = (found[-1][0], float(ends[1]), window)
        else:
            found.append((float(ends[0]), float(ends[1]), str(window)))
    return found


def measure_clock_reasons(telemetry: pl.DataFrame, axis: ChartAxis, bins: int = BINS) -> tuple[list[float], list[ClockReason]]:
    """Measure the edges of the bins, and the reasons that held in any of them: those that lower the clocks first, then by share.

    A sample holds until the next one, but not across a hole.
    """
    known = telemetry.select("t_ns", "clock_event_reasons").drop_nulls()
    if known.is_empty():
        return [], []
    times, masks = known["t_ns"].to_numpy(), known["clock_event_reasons"].to_numpy()
    following = np.append(times[1:], times[-1])
    starts, ends = axis.at(times), axis.at(times + np.minimum(following - times, estimate_hold_ns(times)).astype(np.int64))
    on = ~np.isnan(starts) & ~np.isnan(ends) & (ends > starts)
    if not on.any():
        return [], []
    starts, ends, masks = starts[on], ends[on], masks[on]
    edges = np.linspace(starts[0], ends[-1], bins + 1)
    sampled = _measure_overlap(starts, ends, edges)
    found = []
    for bit, (name, lowers) in CLOCK_EVENTS.items():
        held = (masks & bit) != 0
        if held.any():
            inside = _measure_overlap(starts[held], ends[held], edges)
            shares = [None if whole <= 0 else min(1.0, float(part / whole)) for part, whole in zip(inside, sampled, strict=True)]
            found.append(ClockReason(name, lowers, shares, float(inside.sum() / sampled.sum())))
    return edges.tolist(), sorted(found, key=lambda reason: (not reason.lowers, -reason.share))


def _measure_overlap(starts: Numbers, ends: Numbers, edges: Numbers) -> Numbers:
    lengths = np.cumsum(ends - starts)
    points = np.stack((starts, ends), axis=1).ravel()
    reached = np.stack((np.concatenate(([0.0], lengths[:-1])), lengths), axis=1).ravel()
    return np.asarray(np.diff(np.interp(edges, points, reached)))
