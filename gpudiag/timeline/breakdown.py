"""Where the time of a step went: what the device did at each nanosecond of the analysed steps and over the whole trace; and the critical
path, the longest chain of work and waits through a step, as measured. What is not on it could be longer for free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution import intervals
from gpudiag.model.analysis import Analysis
from gpudiag.model.graph import DEVICE_KINDS, NODE_KINDS, Graph
from gpudiag.model.ops import Bound
from gpudiag.model.report import CriticalRow
from gpudiag.model.timeline import IDLE_BUCKETS, Breakdown, BucketsNs, DeviceTime
from gpudiag.model.trace import Trace, build_empty_table, build_table_schema
from gpudiag.timeline.graph import build_step_graphs

# Priority at one instant, first wins.
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
    """Return the breakdown of each of `steps` (start, end), as `break_down` tells them all: over disjoint steps the parts sum to its."""
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


DELAY = "delay"
"""Kind of a piece that lies on an edge: launch latency, spacing of kernels, waits that nothing explains."""

_HOST_BOUNDS = {"host": "launch"}
"""Bound of the kinds of host time that have another name than the kind."""


class _PathPieces(NamedTuple):
    """A path: node (-1: a delay) and its part [start, end) of the step, in order of time."""

    node: Ints
    start_ns: Ints
    end_ns: Ints


def find_critical_paths(graphs: Iterable[Graph], trace: Trace) -> pl.DataFrame:
    """Return the table `critical_path`: of each graph the pieces that touch and fill its step, origin_ns to end_ns.

    Walked backwards from the end of the step: from each node to the dependency that was over last, at the measured times (the longest
    path of a DAG: Kelley and Walker, Critical-Path Planning and Scheduling, 1959). bound: that of the kernel, the kind of host time
    (launch: Python, framework and launch calls), or dependency for a delay.
    """
    frames = [_build_table(graph, find_path_pieces(graph)) for graph in graphs]
    found = pl.concat([build_empty_table("critical_path").drop("id", "bound"), *frames])
    bounds = trace.kernels.select(pl.col("id").alias("kernel"), pl.col("bound").cast(pl.String).alias("of_kernel"))
    found = found.join(bounds, on="kernel", how="left", maintain_order="left")
    kind = pl.col("kind")
    bound = (
        pl.when(kind == DELAY)
        .then(pl.lit("dependency"))
        .when(kind.is_in(DEVICE_KINDS) | ((kind == "host") & pl.col("kernel").is_not_null()))  # a CPU works in host time
        .then(pl.col("of_kernel").fill_null("unknown"))
        .otherwise(kind.replace(_HOST_BOUNDS))
    )
    found = found.with_columns(id=pl.int_range(pl.len(), dtype=pl.Int64), bound=bound)
    return found.select(list(build_table_schema("critical_path")))


def find_whole_path(analysis: Analysis) -> pl.DataFrame | None:
    """Return the critical path of all analysed steps (columns as `critical_path`); None: nothing is replayed.

    Consecutive steps have one path as far as they are replayed together, each piece in the step in which it begins. Takes as long as to
    build the graphs of the steps that are in none yet.
    """
    run, steps = analysis.run_graph, int(analysis.steps["analysed"].sum())
    if analysis.critical_path is None or analysis.syncs is None or len(analysis.graphs) == steps == 1:
        return analysis.critical_path
    if run is not None and run.step_count == steps:
        return find_critical_paths([run], analysis.trace)
    on_cpu = analysis.device_kind == "cpu"
    graphs = build_step_graphs(analysis.trace, analysis.steps, analysis.idle, analysis.syncs, on_cpu, analysis.host_marks)
    return find_critical_paths(graphs, analysis.trace)


def sum_critical_path(path: pl.DataFrame) -> tuple[CriticalRow, ...]:
    """Return the time of the table `critical_path` by kind and bound, largest first, and its share of all steps in it."""
    length = pl.col("end_ns") - pl.col("start_ns")
    sums = path.group_by("kind", "bound").agg(path_ns=length.sum()).sort(["path_ns", "kind", "bound"], descending=[True, False, False])
    total = int(sums["path_ns"].sum())
    return tuple(CriticalRow(share=row["path_ns"] / total, **row) for row in sums.iter_rows(named=True) if row["path_ns"])


def find_path_pieces(graph: Graph) -> _PathPieces:
    """Return the pieces of the longest path through `graph`, integers that sum to end_ns - origin_ns exactly."""
    start, end = graph.start_ns, graph.start_ns + graph.duration_ns
    # For each node the one that let it begin: the incoming edge that was over last (at a tie the later node); -1: none
    over = end[graph.src] + graph.lag_ns + graph.free_ns
    order = np.lexsort((graph.src, over, graph.dst))
    before = np.full(graph.kind.size, -1, dtype=np.int64)
    before[graph.dst[order]] = graph.src[order]
    # What the end of the step waits for: the last node that is over by then
    node, inside = graph.last_host, np.flatnonzero(end <= graph.end_ns)
    if node < 0 or int(end[node]) != graph.end_ns:
        node = int(inside[np.argmax(end[inside])]) if inside.size else -1
    nodes, borders, reached = list[int](), [graph.end_ns], graph.end_ns
    while node >= 0 and reached > graph.origin_ns:
        for owner, upto in ((-1, int(end[node])), (node, int(start[node]))):
            upto = max(upto, graph.origin_ns)
            if upto < reached:
                nodes.append(owner)
                borders.append(upto)
                reached = upto
        node = int(before[node])
    if reached > graph.origin_ns:
        nodes.append(-1)
        borders.append(graph.origin_ns)
    edges = np.array(borders[::-1], dtype=np.int64)
    return _PathPieces(np.array(nodes[::-1], dtype=np.int64), edges[:-1], edges[1:])


def _build_table(graph: Graph, pieces: _PathPieces) -> pl.DataFrame:
    work, begins = pieces.node >= 0, np.array(graph.begins_ns, dtype=np.int64)

    def of(column: Iterable[int] | Ints) -> pl.Series:
        values = np.append(np.asarray(column, dtype=np.int64), -1)[pieces.node]  # node -1 takes the last one
        return pl.Series(values, dtype=pl.Int64).set(pl.Series(~work | (values < 0)), None)

    lane = np.append(graph.lane, 0)[pieces.node]
    on_device = work & (lane < 0)
    streams = np.array([*graph.streams, -1], dtype=np.int64)
    stream = pl.Series(np.where(on_device, streams[np.where(on_device, -1 - lane, -1)], 0), dtype=pl.Int64)
    kinds = np.array([*NODE_KINDS, DELAY])
    return pl.DataFrame(
        {
            "step": pl.Series(graph.step + np.searchsorted(begins, pieces.start_ns, side="right"), dtype=pl.Int64),
            "start_ns": pl.Series(pieces.start_ns, dtype=pl.Int64),
            "end_ns": pl.Series(pieces.end_ns, dtype=pl.Int64),
            "kind": pl.Series(kinds[np.append(graph.kind, len(NODE_KINDS))[pieces.node]].tolist(), dtype=pl.String),
            "kernel": of(graph.kernel),
            "op": of(graph.op),
            "thread": of(graph.lane),
            "stream": stream.set(pl.Series(~on_device), None),
        }
    )
