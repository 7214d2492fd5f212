"""How far the host runs ahead of the device: launch delay, queue depth, launches per step, share of kernels that the device waited for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.model.replay import QueueStats
from gpudiag.model.trace import Trace

Ints = npt.NDArray[np.int64]

CURVE_POINTS = 512

LATENCY_FACTOR = 1.5
"""A kernel counts as waited for up to this many times the median latency of kernels that met an idle device: half of those lie above the
median, few far above it (90th percentile below twice the median in most of the real traces that the tests look at)."""

LEAST_LATENCY_NS, MOST_LATENCY_NS = 5_000, 50_000
"""Bounds of the normal latency from launch call to kernel: no GPU starts one in less than about 5 us (lowest twentieth in traces of V100
to H100 and MI300X), and above 50 us something else was in the way."""


class _Work(NamedTuple):
    """The launched work of a device, by start: times of the call and of the work in ns, launch row."""

    called: Ints
    issued: Ints
    start: Ints
    end: Ints
    launch: Ints


def queue_stats(trace: Trace, steps: pl.DataFrame, window: intervals.Spans) -> QueueStats | None:
    """Return how far the host ran ahead within `window` (the analysed `steps`); None where no launch of the device's work was recorded.

    `trace` at stage 'link' with the kernels of the analysed device alone. Kernels that a graph launch started count for the depth; for
    the delay only the first one does. Work whose launch was not recorded counts for the depth from its start.
    """
    kernels = trace.kernels.select("kind", "launch", "start_ns", "end_ns").filter(pl.col("kind") != "cpu")
    work = _launched(kernels, trace.launches)
    inside = intervals.covered(window, work.called, work.called + 1) > 0 if len(work.called) else np.zeros(0, dtype=bool)
    if not len(window) or not inside.any():
        return None
    first = _first_of_launch(work.launch) & inside
    delay = np.maximum(work.start - work.issued, 0)[first]
    count = max(int(steps["analysed"].sum()), 1)
    t, depth = _depth(work, kernels.filter(pl.col("launch").is_null()))
    lengths = _within(window, t)
    low, middle, high = (int(value) for value in np.percentile(delay, [10, 50, 90], method="nearest"))
    at, curve = _curve(t, depth, window)
    return QueueStats(
        launches_per_step=int(first.sum()) / count,
        kernels_per_step=int(inside.sum()) / count,
        delay_median_ns=middle,
        delay_p10_ns=low,
        delay_p90_ns=high,
        depth_median=_weighted_median(depth, lengths),
        depth_max=int(depth[lengths > 0].max(initial=0)),
        empty_share=float(lengths[depth == 0].sum()) / intervals.total(window),
        host_bound_share=float(_waited_for(work)[inside].mean()),
        t_ns=at,
        depth=curve,
    )


def _launched(kernels: pl.DataFrame, launches: pl.DataFrame) -> _Work:
    """Return the work that has a launch record. A call that returned after its work had begun had issued it by then."""
    calls = launches.select(pl.col("id").alias("launch"), pl.col("start_ns").alias("called"), pl.col("end_ns").alias("issued"))
    frame = kernels.select("launch", "start_ns", "end_ns").join(calls, on="launch", how="inner")
    frame = frame.sort("start_ns", "launch")
    issued = pl.min_horizontal("issued", "start_ns").clip(upper_bound=pl.col("end_ns"))
    columns = frame.select("called", issued, "start_ns", "end_ns", "launch")
    return _Work(*(columns[name].to_numpy() for name in columns.columns))


def _first_of_launch(launch: Ints) -> npt.NDArray[np.bool_]:
    """Return which row is the first one of its launch (rows by start)."""
    first = np.zeros(len(launch), dtype=bool)
    first[np.unique(launch, return_index=True)[1]] = True
    return first


def _waited_for(work: _Work) -> npt.NDArray[np.bool_]:
    """Return which work began within the normal latency of its call, so that the device had been waiting for it."""
    latency = work.start - work.called
    met_idle = (_reached_before(work.end) <= work.called) & _first_of_launch(work.launch)
    normal = int(np.median(latency[met_idle])) if met_idle.any() else LEAST_LATENCY_NS
    soon: npt.NDArray[np.bool_] = latency <= np.clip(LATENCY_FACTOR * normal, LEAST_LATENCY_NS, MOST_LATENCY_NS)
    return soon


def _reached_before(end: Ints) -> Ints:
    """Return the latest end of the work before each row (rows by start); the smallest integer for the first one."""
    reached: Ints = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]))[: len(end)]
    return reached


def _depth(work: _Work, unlinked: pl.DataFrame) -> tuple[Ints, Ints]:
    """Return (moments, depth from each on): work issued and not yet over. The first moment lies before all work, at depth 0."""
    ups = np.concatenate((work.issued, unlinked["start_ns"].to_numpy()))
    downs = np.concatenate((work.end, unlinked["end_ns"].to_numpy()))
    moments, place = np.unique(np.concatenate((ups, downs)), return_inverse=True)
    change = np.bincount(place[: len(ups)], minlength=len(moments)) - np.bincount(place[len(ups) :], minlength=len(moments))
    before = np.iinfo(np.int64).min // 2
    return np.concatenate(([before], moments)), np.concatenate(([0], np.cumsum(change)))


def _within(window: intervals.Spans, t: Ints) -> Ints:
    """Return how much of the time from each moment to the next lies in `window`, in ns."""
    after = np.append(t[1:], np.iinfo(np.int64).max // 2)
    return intervals.covered(window, t, after)


def _weighted_median(values: Ints, weights: Ints) -> float:
    """Return the smallest value below or at which half of the weight lies."""
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, sums[-1] / 2)])


def _curve(t: Ints, depth: Ints, window: intervals.Spans) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return (moments from the start of the window, mean depth to the next one), at most CURVE_POINTS."""
    first, last = int(window[0, 0]), int(window[-1, 1])
    edges = np.unique(np.linspace(first, last, min(CURVE_POINTS, last - first) + 1).astype(np.int64))
    # the integral of the depth up to any moment, by the pieces between its changes
    own = np.clip(t, first, last)
    areas = np.concatenate(([0.0], np.cumsum(depth[:-1] * np.diff(own).astype(np.float64))))
    row = np.searchsorted(own, edges, side="right") - 1
    upto = areas[row] + depth[row] * (edges - own[row])
    mean = np.diff(upto) / np.diff(edges)
    return tuple(int(moment) for moment in edges[:-1] - first), tuple(round(float(value), 2) for value in mean)
