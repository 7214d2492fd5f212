"""What the device did at each nanosecond of the analysed steps, and over the whole trace."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.model.breakdown import IDLE_BUCKETS, Breakdown, BucketsNs, DeviceTime
from gpudiag.model.cost import Bound

# Priority at one instant, first wins (architecture.md section 3).
_ORDER: tuple[tuple[str, Bound], ...] = (
    ("compute", "compute"),
    ("memory", "memory"),
    ("overhead", "overhead"),
    ("unknown", "unknown"),
    ("exposed_communication", "communication"),
    ("exposed_copy", "copy"),
)


def breakdown(bounds: pl.Series, spans: intervals.Spans, window: intervals.Spans, idle: pl.DataFrame | None = None) -> Breakdown:
    """Return the partition of `window` (the analysed steps) by the bound of the work that `spans` (one per bound) covers.

    What nothing covers goes by the causes of `idle` (its pieces are disjoint); what no piece holds is idle_unexplained.
    """
    layers = [intervals.union(spans[(bounds == bound).to_numpy()]) for _, bound in _ORDER]
    causes = [] if idle is None else [name for name in IDLE_BUCKETS if name != "idle_unexplained" and (idle["cause"] == name).any()]
    pieces = [] if idle is None else [intervals.of(idle.filter(pl.col("cause") == name)) for name in causes]
    *sums, rest = intervals.partition(window, [*layers, *pieces])
    buckets = dict(zip([*(bucket for bucket, _ in _ORDER), *causes], sums, strict=True))
    return Breakdown(intervals.total(window), BucketsNs(**buckets, idle_unexplained=rest))


def unknown_breakdown(window: intervals.Spans) -> Breakdown:
    """Return the breakdown where the device's work was not recorded: all of it unknown, none of it called idle."""
    wall = intervals.total(window)
    return Breakdown(wall, BucketsNs(unknown=wall))


def device_time(kernels: pl.DataFrame) -> DeviceTime | None:
    """Return the unions over every event of the device whose rows `kernels` holds; None where there is none."""
    if not kernels.height:
        return None
    copy = intervals.of(kernels.filter(pl.col("kind") == "memcpy"))
    communication = intervals.of(kernels.filter(pl.col("collective")))
    compute = intervals.of(kernels.filter((pl.col("kind") != "memcpy") & ~pl.col("collective")))
    busy = intervals.of(kernels)
    first, last = int(kernels["start_ns"].min()), int(kernels["end_ns"].max())  # type: ignore[arg-type]
    whole = np.array([[first, last]], dtype=np.int64)
    compute_ns, exposed_communication, exposed_copy, _ = intervals.partition(whole, [compute, communication, copy])
    return DeviceTime(
        span_ns=last - first,
        busy_ns=intervals.total(busy),
        idle_ns=last - first - intervals.total(busy),
        compute_ns=compute_ns,
        communication_ns=intervals.total(communication),
        exposed_communication_ns=exposed_communication,
        copy_ns=intervals.total(copy),
        exposed_copy_ns=exposed_copy,
    )
