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
    return _partitioned(window, _layers(bounds, spans, idle))


def step_breakdowns(bounds: pl.Series, spans: intervals.Spans, steps: intervals.Spans, idle: pl.DataFrame | None = None) -> list[Breakdown]:
    """Return the breakdown of each of `steps` (start, end), as `breakdown` tells them all: over disjoint steps the parts sum to its."""
    layers = _layers(bounds, spans, idle)
    return [_partitioned(step[None, :], {name: _reaching(layer, *step) for name, layer in layers.items()}) for step in steps]


def _layers(bounds: pl.Series, spans: intervals.Spans, idle: pl.DataFrame | None) -> dict[str, intervals.Spans]:
    """Return the time of each bucket in the order of precedence, but for what is left."""
    layers = {bucket: intervals.union(spans[(bounds == bound).to_numpy()]) for bucket, bound in _ORDER}
    causes = [] if idle is None else [name for name in IDLE_BUCKETS if name != "idle_unexplained" and (idle["cause"] == name).any()]
    pieces = {} if idle is None else {name: intervals.of(idle.filter(pl.col("cause") == name)) for name in causes}
    return layers | pieces


def _partitioned(window: intervals.Spans, layers: dict[str, intervals.Spans]) -> Breakdown:
    *sums, rest = intervals.partition(window, list(layers.values()))
    return Breakdown(intervals.total(window), BucketsNs(**dict(zip(layers, sums, strict=True)), idle_unexplained=rest))


def _reaching(layer: intervals.Spans, start: int, end: int) -> intervals.Spans:
    """Return the spans of `layer` that reach into [start, end)."""
    return layer[np.searchsorted(layer[:, 1], start, side="right") : np.searchsorted(layer[:, 0], end, side="left")]


def unknown_breakdown(window: intervals.Spans) -> Breakdown:
    """Return the breakdown where the device's work was not recorded: all of it unknown, none of it called idle."""
    wall = intervals.total(window)
    return Breakdown(wall, BucketsNs(unknown=wall))


def device_time(kernels: pl.DataFrame) -> DeviceTime | None:
    """Return the unions over every event of the device whose rows `kernels` holds; None where there is none."""
    if not kernels.height:
        return None
    kernels = kernels.select("start_ns", "end_ns", "kind", "collective")  # each filter copies all columns that there are
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
