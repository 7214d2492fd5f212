"""The critical path: worked steps, and that its pieces fill every step exactly."""

from __future__ import annotations

import numpy as np
import polars as pl
import smallgraphs as small
from hypothesis import given, settings
from hypothesis import strategies as st
from tracecheck import check_table

from gpudiag.model.graph import Graph
from gpudiag.timeline.breakdown import find_critical_paths, find_path_pieces, sum_critical_path


def _rows(graph: Graph) -> list[tuple[str, str, float]]:
    path = find_critical_paths([graph], small.launch_bound_trace())
    check_table("critical_path", path)
    lengths = ((path["end_ns"] - path["start_ns"]) / 1000).to_list()
    return list(zip(path["kind"].to_list(), path["bound"].to_list(), lengths, strict=True))


def test_the_path_of_a_launch_bound_step_runs_over_the_host_and_the_last_kernel() -> None:
    assert _rows(small.launch_bound()) == [
        ("data", "data", 100),
        ("host", "launch", 50),
        ("launch", "launch", 10),
        ("host", "launch", 100),
        ("launch", "launch", 10),
        ("delay", "dependency", 5),
        ("kernel", "overhead", 40),
        ("delay", "dependency", 10),
        ("sync", "sync", 5),
    ]


def test_pieces_carry_op_thread_and_stream_and_rows_sum_them() -> None:
    path = find_critical_paths([small.launch_bound()], small.launch_bound_trace())
    kernel = path.row(6, named=True)
    assert (kernel["kernel"], kernel["op"], kernel["thread"], kernel["stream"]) == (1, 1, None, 7)
    host = path.row(3, named=True)
    assert (host["kernel"], host["op"], host["thread"], host["stream"]) == (None, 1, 0, None)
    rows = sum_critical_path(path)
    assert [(row.kind, row.bound, row.path_ns) for row in rows[:2]] == [("host", "launch", 150_000), ("data", "data", 100_000)]
    assert sum(row.path_ns for row in rows) == 330_000
    assert abs(sum(row.share for row in rows) - 1) < 1e-12


def test_time_after_the_last_node_and_before_the_first_is_delay() -> None:
    only = small.graph([small.node("kernel", 20, 50, kernel=0)], [small.edge(0, 1, "launch", 20)], end=60)
    assert _rows(only) == [("delay", "dependency", 20), ("kernel", "memory", 30), ("delay", "dependency", 10)]


def test_an_op_of_a_cpu_run_is_work_and_not_launch() -> None:
    cpu = small.graph([small.node("host", 0, 50, kernel=0), small.node("host", 50, 60)], [small.edge(0, 1), small.edge(1, 2)], end=60)
    assert _rows(cpu) == [("host", "memory", 50), ("host", "launch", 10)]


def test_no_graph_has_no_path() -> None:
    path = find_critical_paths([], small.launch_bound_trace())
    assert path.is_empty()
    assert sum_critical_path(path) == ()


@st.composite
def random_graphs(draw: st.DrawFn) -> Graph:
    """Return a graph of up to 30 nodes whose measured times follow from its edges, or are a little off."""
    count = draw(st.integers(1, 30))
    nodes, edges, ends = [], [], [0.0]
    for number in range(1, count + 1):
        lane = draw(st.sampled_from([0, 1, -1, -2]))
        kind = draw(st.sampled_from(["kernel", "copy", "communication"] if lane < 0 else ["host", "launch", "sync", "data", "gc", "io"]))
        sources = draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=3, unique=True))
        lags = [draw(st.integers(0, 9)) for _ in sources]
        free = [draw(st.integers(0, 5)) if kind != "sync" else 0 for _ in sources]
        off = draw(st.integers(-2, 2))
        start = max(0, max(ends[src] + lag + extra for src, lag, extra in zip(sources, lags, free, strict=True)) + off)
        ends.append(start + draw(st.integers(0, 40)))
        nodes.append(small.node(kind, start, ends[-1], lane=lane if lane else 0))
        word = "launch" if lane < 0 else "sync" if kind == "sync" else "thread"
        edges += [small.edge(src, number, word, lag, extra) for src, lag, extra in zip(sources, lags, free, strict=True)]
    last = draw(st.integers(-1, count))
    end = max(ends) + draw(st.integers(-3, 10))
    return small.graph(nodes, edges, end=max(end, 1), last_host=last)


@given(random_graphs())
@settings(max_examples=200, deadline=None)
def test_pieces_touch_fill_the_step_and_never_exceed_it(graph: Graph) -> None:
    pieces = find_path_pieces(graph)
    assert pieces.start_ns[0] == graph.origin_ns
    assert pieces.end_ns[-1] == graph.end_ns
    assert (pieces.start_ns[1:] == pieces.end_ns[:-1]).all()
    assert (pieces.end_ns > pieces.start_ns).all()
    work = pieces.node >= 0
    held = graph.duration_ns[pieces.node[work]]
    assert ((pieces.end_ns - pieces.start_ns)[work] <= held).all()
    assert (np.diff(pieces.node[work]) > 0).all()  # a path: no node twice, none before what it depends on


@given(random_graphs(), random_graphs())
@settings(max_examples=30, deadline=None)
def test_rows_sum_to_the_steps(first: Graph, second: Graph) -> None:
    path = find_critical_paths([first, second], small.trace(kernels=[]))
    walls = [graph.end_ns - graph.origin_ns for graph in (first, second)]
    assert sum(row.path_ns for row in sum_critical_path(path)) == sum(walls)
    assert path.select((pl.col("end_ns") - pl.col("start_ns")).sum()).item() == sum(walls)
