"""Graphs of simulated runs, and random ones, for the tests of the graph, the replay and what stands on them."""

from __future__ import annotations

import numpy as np
import polars as pl
from hypothesis import strategies as st
from simulator import Simulation

from gpudiag.attribution.links import link_kernels
from gpudiag.attribution.steps import find_steps
from gpudiag.model.graph import Graph, encode_node_kind
from gpudiag.model.trace import build_empty_table, build_table_schema
from gpudiag.timeline.graph import build_all_graphs
from gpudiag.timeline.launch_queue import find_syncs


def graphs_of(run: Simulation) -> tuple[Graph, ...]:
    """Return the graphs of the representative steps of a simulated run."""
    return graphs_in_a_row(run)[0]


def graphs_in_a_row(run: Simulation) -> tuple[tuple[Graph, ...], Graph | None]:
    """Return these, and the graph of all analysed steps."""
    trace = run.trace()
    steps = find_steps(trace).table
    trace, _ = link_kernels(trace, steps, on_cpu=False)
    return build_all_graphs(
        trace,
        steps,
        build_empty_table("idle"),
        find_syncs(trace, steps),
        False,
        _host_marks(run, trace.meta.unix_base_ns or 0),
    )


def _host_marks(run: Simulation, base_ns: int) -> pl.DataFrame:
    """Return what a bundle would hold of the run's garbage collections and saves."""
    rows = [{**mark, "start_unix_ns": mark["start_ns"] + base_ns, "step": 0} for mark in run.host_marks]
    schema = build_table_schema("host_marks")
    return pl.DataFrame([{name: row[name] for name in schema} for row in rows], schema=schema, orient="row")


def middle(run: Simulation) -> Graph:
    """Return the graph of the median step."""
    graphs = graphs_of(run)
    return sorted(graphs, key=lambda graph: graph.end_ns - graph.origin_ns)[len(graphs) // 2]


@st.composite
def random_graphs(draw: st.DrawFn) -> Graph:
    """A graph of up to 40 nodes with measured times that its edges allow: each node starts at or after all that it waits for."""
    count = draw(st.integers(2, 40))
    durations = [0, *draw(st.lists(st.integers(0, 1000), min_size=count - 1, max_size=count - 1))]
    edges: list[tuple[int, int, int, int]] = []
    start = [100] * count
    for dst in range(1, count):
        for src in sorted(draw(st.sets(st.integers(0, dst - 1), min_size=1, max_size=4))):
            delays = draw(st.integers(0, 50)), draw(st.sampled_from([0, 0, 0, 70]))
            edges += [(src, dst, *delays)]
        start[dst] = max(start[a] + durations[a] + lag + free for a, b, lag, free in edges if b == dst)
    columns = np.array(edges, dtype=np.int64)
    start_ns, duration_ns = np.array(start, dtype=np.int64), np.array(durations, dtype=np.int64)
    nothing = np.full(count, -1, dtype=np.int64)
    lane = np.array([0, *draw(st.lists(st.sampled_from([0, 1, -1, -2]), min_size=count - 1, max_size=count - 1))], dtype=np.int64)
    kind = np.where(lane < 0, encode_node_kind("kernel"), encode_node_kind("host")).astype(np.int8)
    end = start_ns + duration_ns
    src, dst, lag, free = columns.T
    return Graph(
        step=0, kind=kind, lane=lane, streams=(7, 8), start_ns=start_ns, duration_ns=duration_ns, origin_ns=100, end_ns=int(end.max()),
        kernel=nothing, launch=nothing, op=nothing, src=src, dst=dst, edge_kind=np.zeros(len(src), dtype=np.int8), lag_ns=lag,
        free_ns=free, last_host=int(np.flatnonzero(lane == 0)[-1]),
    )  # fmt: skip
