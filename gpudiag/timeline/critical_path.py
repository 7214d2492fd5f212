"""The critical path: the longest chain of work and waits through a step, as measured; what is not on it could be longer for free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.model.graph import DEVICE_KINDS, NODE_KINDS, Graph
from gpudiag.model.report import CriticalRow
from gpudiag.model.trace import Trace, build_empty_table, build_table_schema

DELAY = "delay"
"""Kind of a piece that lies on an edge: launch latency, spacing of kernels, waits that nothing explains."""

_HOST_BOUNDS = {"host": "launch"}
"""Bound of the kinds of host time that have another name than the kind."""


class _PathPieces(NamedTuple):
    """A path: node (-1: a delay) and its part [start, end) of the step, in order of time."""

    node: Ints
    start_ns: Ints
    end_ns: Ints


def find_critical_paths(graphs: Sequence[Graph], trace: Trace) -> pl.DataFrame:
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
    work = pieces.node >= 0

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
            "step": pl.Series([graph.step] * pieces.node.size, dtype=pl.Int64),
            "start_ns": pl.Series(pieces.start_ns, dtype=pl.Int64),
            "end_ns": pl.Series(pieces.end_ns, dtype=pl.Int64),
            "kind": pl.Series(kinds[np.append(graph.kind, len(NODE_KINDS))[pieces.node]].tolist(), dtype=pl.String),
            "kernel": of(graph.kernel),
            "op": of(graph.op),
            "thread": of(graph.lane),
            "stream": stream.set(pl.Series(~on_device), None),
        }
    )
