"""What the device did at each nanosecond of the analysed steps, and over the whole trace."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.model.ops import Bound
from gpudiag.model.timeline import IDLE_BUCKETS, Breakdown, BucketsNs, DeviceTime

# Priority at one instant, first wins (architecture.md section 3).
_BUCKET_ORDER: tuple[tuple[str, Bound], ...] = (
    ("compute", "compute"),
    ("memory", "memory"),
    ("overhead", "overhead"),
    ("unknown", "unknown"),
    ("exposed_communication", "communication"),
    ("exposed_copy", "copy"),
)


def break_down(bounds: pl.Series, spans: intervals.Spans, window: intervals.Spans, idle: pl.DataFrame | None = None) -> Breakdown:
    """Return the partition of `window` (the analysed steps) by the bound of the work that `spans` (one per bound) covers.

    What nothing covers goes by the causes of `idle` (its pieces are disjoint); what no piece holds is idle_unexplained.
    """
    return _partition(window, _build_layers(bounds, spans, idle))


def break_down_steps(
    bounds: pl.Series, spans: intervals.Spans, steps: intervals.Spans, idle: pl.DataFrame | None = None
) -> list[Breakdown]:
    """Return the breakdown of each of `steps` (start, end), as `breakdown` tells them all: over disjoint steps the parts sum to its."""
    layers, found = _build_layers(bounds, spans, idle), []
    for step in steps:
        reaching = {
            name: layer[np.searchsorted(layer[:, 1], step[0], side="right") : np.searchsorted(layer[:, 0], step[1], side="left")]
            for name, layer in layers.items()
        }
        found.append(_partition(step[None, :], reaching))
    return found


def _build_layers(bounds: pl.Series, spans: intervals.Spans, idle: pl.DataFrame | None) -> dict[str, intervals.Spans]:
    """Return the time of each bucket in the order of precedence, but for what is left."""
    layers = {bucket: intervals.merge_spans(spans[(bounds == bound).to_numpy()]) for bucket, bound in _BUCKET_ORDER}
    every = ("outside_recording", *IDLE_BUCKETS)
    causes = [] if idle is None else [name for name in every if name != "idle_unexplained" and (idle["cause"] == name).any()]
    pieces = {} if idle is None else {name: intervals.build_spans(idle.filter(pl.col("cause") == name)) for name in causes}
    return layers | pieces


def _partition(window: intervals.Spans, layers: dict[str, intervals.Spans]) -> Breakdown:
    *sums, rest = intervals.partition_window(window, list(layers.values()))
    return Breakdown(intervals.measure_spans(window), BucketsNs(**dict(zip(layers, sums, strict=True)), idle_unexplained=rest))


def build_unknown_breakdown(window: intervals.Spans) -> Breakdown:
    """Return the breakdown where the device's work was not recorded: all of it unknown, none of it called idle."""
    wall = intervals.measure_spans(window)
    return Breakdown(wall, BucketsNs(unknown=wall))


def measure_device_time(kernels: pl.DataFrame) -> DeviceTime | None:
    """Return the unions over every event of the device whose rows `kernels` holds; None where there is none."""
    if not kernels.height:
        return None
    kernels = kernels.select("start_ns", "end_ns", "kind", "collective")  # each filter copies all columns that there are
    copy = intervals.build_spans(kernels.filter(pl.col("kind") == "memcpy"))
    communication = intervals.build_spans(kernels.filter(pl.col("collective")))
    compute = intervals.build_spans(kernels.filter((pl.col("kind") != "memcpy") & ~pl.col("collective")))
    busy = intervals.build_spans(kernels)
    first, last = int(kernels["start_ns"].min()), int(kernels["end_ns"].max())  # type: ignore[arg-type]
    whole = np.array([[first, last]], dtype=np.int64)
    compute_ns, exposed_communication, exposed_copy, _ = intervals.partition_window(whole, [compute, communication, copy])
    return DeviceTime(
        span_ns=last - first,
        busy_ns=intervals.measure_spans(busy),
        idle_ns=last - first - intervals.measure_spans(busy),
        compute_ns=compute_ns,
        communication_ns=intervals.measure_spans(communication),
        exposed_communication_ns=exposed_communication,
        copy_ns=intervals.measure_spans(copy),
        exposed_copy_ns=exposed_copy,
    )
