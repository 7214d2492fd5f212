"""The launch queue: how far the host runs ahead of the device, launch delay, depth, and the depth at which launches block."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Bools, Ints
from gpudiag.attribution import intervals
from gpudiag.model.graph import QUEUE_LIMIT
from gpudiag.model.timeline import QueueStats
from gpudiag.model.trace import Trace

CURVE_POINTS = 512

LATENCY_FACTOR = 1.5
"""A kernel counts as waited for up to this many times the median latency of kernels that met an idle device: half of those lie above the
median, few far above it (90th percentile below twice the median in most of the real traces that the tests look at)."""

LEAST_LATENCY_NS, MOST_LATENCY_NS = 5_000, 50_000
"""Bounds of the normal latency from launch call to kernel: no GPU starts one in less than about 5 us (lowest twentieth in traces of V100
to H100 and MI300X), and above 50 us something else was in the way."""


def measure_queue(trace: Trace, steps: pl.DataFrame, window: intervals.Spans) -> QueueStats | None:
    """Return how far the host ran ahead within `window` (the analysed `steps`); None where no launch of the device's work was recorded.

    `trace` at stage 'link' with the kernels of the analysed device alone. Kernels that a graph launch started count for the depth; for
    the delay only the first one does. Work whose launch was not recorded counts for the depth from its start.
    """
    kernels = trace.kernels.select("kind", "launch", "start_ns", "end_ns").filter(pl.col("kind") != "cpu")
    # The work that has a launch record. A call that returned after its work had begun had issued it by then
    calls = trace.launches.select(pl.col("id").alias("launch"), pl.col("start_ns").alias("called"), pl.col("end_ns").alias("issued"))
    frame = kernels.select("launch", "start_ns", "end_ns").join(calls, on="launch", how="inner")
    frame = frame.sort("start_ns", "launch")
    issued = pl.min_horizontal("issued", "start_ns").clip(upper_bound=pl.col("end_ns"))
    columns = frame.select("called", issued, "start_ns", "end_ns", "launch")
    called, given, start, end, launch = (columns[name].to_numpy() for name in columns.columns)
    inside = intervals.measure_covered(window, called, called + 1) > 0 if len(called) else np.zeros(0, dtype=bool)
    if not len(window) or not inside.any():
        return None
    firsts = np.zeros(len(launch), dtype=bool)
    firsts[np.unique(launch, return_index=True)[1]] = True
    first = firsts & inside
    delay = np.maximum(start - given, 0)[first]
    count = max(int(steps["analysed"].sum()), 1)
    # (moments, depth from each on): work issued and not yet over. The first moment lies before all work, at depth 0
    unlinked = kernels.filter(pl.col("launch").is_null())
    ups = np.concatenate((given, unlinked["start_ns"].to_numpy()))
    downs = np.concatenate((end, unlinked["end_ns"].to_numpy()))
    moments, place = np.unique(np.concatenate((ups, downs)), return_inverse=True)
    change = np.bincount(place[: len(ups)], minlength=len(moments)) - np.bincount(place[len(ups) :], minlength=len(moments))
    before = np.iinfo(np.int64).min // 2
    t, depth = (np.concatenate(([before], moments)), np.concatenate(([0], np.cumsum(change))))
    lengths = intervals.measure_covered(window, t, np.append(t[1:], np.iinfo(np.int64).max // 2))  # how long each depth lasts in it
    by_depth = np.argsort(depth, kind="stable")
    lasted = np.cumsum(lengths[by_depth])
    low, middle, high = (int(value) for value in np.percentile(delay, [10, 50, 90], method="nearest"))
    at, curve = _draw_curve(t, depth, window)
    # Which work began within the normal latency of its call, so that the device had been waiting for it
    latency = start - called
    # The latest end of the work before each row (rows by start); the smallest integer for the first one
    reached: Ints = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]))[: len(end)]
    met_idle = (reached <= called) & firsts
    normal = int(np.median(latency[met_idle])) if met_idle.any() else LEAST_LATENCY_NS
    soon: Bools = latency <= np.clip(LATENCY_FACTOR * normal, LEAST_LATENCY_NS, MOST_LATENCY_NS)
    return QueueStats(
        launches_per_step=int(first.sum()) / count,
        kernels_per_step=int(inside.sum()) / count,
        delay_median_ns=middle,
        delay_p10_ns=low,
        delay_p90_ns=high,
        depth_median=float(depth[by_depth][np.searchsorted(lasted, lasted[-1] / 2)]),
        depth_max=int(depth[lengths > 0].max(initial=0)),
        empty_share=float(lengths[depth == 0].sum()) / intervals.measure_spans(window),
        host_bound_share=float(soon[inside].mean()),
        t_ns=at,
        depth=curve,
    )


def _draw_curve(t: Ints, depth: Ints, window: intervals.Spans) -> tuple[tuple[int, ...], tuple[float, ...]]:
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


LEAST_CALLS = 16
"""So many calls must reach a depth, and wait there, to be held up by a queue of that depth."""

LEAST_DEPTH = 8
"""A queue is longer than this: calls that wait with less ahead of them wait for something else."""

PLATEAU_SHARE, PLATEAU = 0.03, 2
"""Calls within 3 % of the depth, or two launches, count as at it: the clocks of host and device differ by a few launches."""

BLOCKED_TIMES = 3
"""Calls at a full queue take at least this many times what calls take far from it."""

BLOCKED_SHARE = 0.9
"""Of the calls that take so long at least this part stands at the full queue: what else holds calls up does so at any depth."""

LAUNCH_CALL_NS = 5_000
"""What a launch call takes on current hosts (3 to 8 us at the median of recordings from V100 to MI300X)."""

FREED_NS = 10_000
"""A call that was held up returns within this time of the begin of some work, which freed its place."""


class IssuedLaunches(NamedTuple):
    """The calls that start work, by row of `launches`, and what stood in the queue when each began."""

    row: Ints
    start: Ints
    end: Ints
    begun: Ints
    """When the first work of each began, at the earliest when the call was over."""
    ahead: Ints
    """Launches that had been issued and had not begun when the call began."""

    def near(self, limit: int) -> Bools:
        """Return which calls met a queue that was as good as full."""
        found: Bools = self.ahead >= limit - max(PLATEAU, int(PLATEAU_SHARE * limit))
        return found


def find_issued_launches(launch: Ints, start: Ints, call_start: Ints, call_end: Ints) -> IssuedLaunches:
    """Return the launches of the work (`launch`: row of launches or -1, `start`: of the work; both by work, the calls' times by row)."""
    linked = np.flatnonzero(launch >= 0)
    row, place = np.unique(launch[linked], return_inverse=True)
    first = np.full(len(row), np.iinfo(np.int64).max)
    np.minimum.at(first, place, start[linked])
    begin, end = call_start[row], call_end[row]
    begun = np.maximum(first, end)
    ahead = np.searchsorted(np.sort(end), begin, "right") - np.searchsorted(np.sort(begun), begin, "right")
    return IssuedLaunches(row, begin, end, begun, ahead)


def estimate_queue_limit(calls: IssuedLaunches, blocking: Ints) -> int:
    """Return how many launches can stand in the queue: the depth at which calls block, else QUEUE_LIMIT or what was seen beyond it.

    `blocking`: rows of launches that waited for the device for another reason (copies from pageable memory). A queue is short where
    enough calls reach its depth, none goes beyond, and most calls there take several times the usual and return as some work begins.
    Usual is what calls far from that depth take; where most calls stand at it, hardly any is far, or the queue was full before the
    recording began.
    """
    free = ~np.isin(calls.row, blocking)
    ahead, length = calls.ahead[free], (calls.end - calls.start)[free]
    if len(ahead) < 2 * LEAST_CALLS:
        return QUEUE_LIMIT
    top = int(np.sort(ahead)[-LEAST_CALLS])
    full = ahead >= top - max(PLATEAU, int(PLATEAU_SHARE * top))
    far = ahead < top / 2
    usual = float(np.median(length[far])) if far.sum() >= LEAST_CALLS else np.inf
    usual = min(usual, LAUNCH_CALL_NS) if full.mean() > 0.5 else usual
    # All calls at the depth wait; or, where places come free many at a time, some do, none elsewhere is so long, and they hold most time
    waited = length > BLOCKED_TIMES * usual
    some = (waited & full).sum() >= max(LEAST_CALLS, BLOCKED_SHARE * waited.sum()) and length[waited & full].sum() > length.sum() / 2
    if top >= LEAST_DEPTH and (some or np.median(length[full]) > BLOCKED_TIMES * usual):
        held_up = full & waited if some else full
        begun, end = np.sort(calls.begun), calls.end[free][held_up]
        since = end - np.append(begun, 0)[np.searchsorted(begun, end, "right") - 1]
        if np.mean((since >= 0) & (since <= FREED_NS)) > 0.5:
            return top
    return max(QUEUE_LIMIT, int(calls.ahead.max(initial=0)))
