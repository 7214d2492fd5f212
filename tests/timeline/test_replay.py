"""The replay: laws over random graphs, worked small ones, and step times of simulated runs with a cause taken away."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import simulator as s
from graphs import middle, random_graphs
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.model.graph import QUEUE_LIMIT, Graph, encode_edge_kind, encode_node_kind
from gpudiag.timeline.replay import measure_free_delay, replay, steady_step_ns


def _handmade(nodes: list[tuple[int, int]], edges: list[tuple[int, int, int]]) -> Graph:
    """Return a graph of (lane, duration) nodes and (src, dst, lag) edges, all starts 0."""
    lane, duration = (np.array(column, dtype=np.int64) for column in zip(*nodes, strict=True))
    src, dst, lag = (np.array(column, dtype=np.int64) for column in zip(*edges, strict=True))
    nothing = np.full(len(lane), -1, dtype=np.int64)
    return Graph(
        step=0, kind=np.where(lane < 0, encode_node_kind("kernel"), encode_node_kind("host")).astype(np.int8), lane=lane, streams=(7,),
        start_ns=nothing * 0, duration_ns=duration, kernel=nothing, launch=nothing, op=nothing, src=src, dst=dst,
        edge_kind=np.zeros(len(src), dtype=np.int8), lag_ns=lag, free_ns=lag * 0, origin_ns=0, end_ns=0,
        last_host=int(np.flatnonzero(lane == 0)[-1]),
    )  # fmt: skip


def test_a_node_begins_when_the_last_of_many_predecessors_is_over() -> None:
    five = _handmade([(0, 0), (0, 10), (0, 50), (0, 30), (0, 20), (-1, 7)], [(0, 1, 0), (0, 2, 0), (0, 3, 0), (0, 4, 0),
                     (1, 5, 5), (2, 5, 0), (3, 5, 21), (4, 5, 1)])  # fmt: skip
    # 10 + 5, 50 + 0, 30 + 21, 20 + 1: the third
    assert replay(five).start.tolist() == [0, 0, 0, 0, 0, 51]
    assert replay(five).step_ns == 58


def test_a_repeated_step_lasts_as_long_as_its_slower_lane() -> None:
    """Host 10 + 5 a step, device 40 + 2 between: the device sets the pace though one step alone takes 55."""
    graph = _handmade([(0, 0), (0, 10), (0, 5), (-1, 40)], [(0, 1, 0), (1, 2, 0), (1, 3, 5)])
    assert replay(graph).step_ns == 55
    assert steady_step_ns(graph) == 40
    assert steady_step_ns(graph, duration=np.array([0, 10, 45, 40])) == 55


@given(random_graphs())
def test_an_unchanged_graph_replays_its_measured_times(graph: Graph) -> None:
    once = replay(graph)
    assert (once.start == graph.start_ns).all()
    assert once.step_ns == graph.end_ns - graph.origin_ns
    assert 0 <= measure_free_delay(graph, once) <= once.step_ns


@given(random_graphs(), st.integers(1, 4), st.integers(2, 5))
def test_a_dropped_edge_is_no_edge(graph: Graph, every: int, repeats: int) -> None:
    """Whether the order of the nodes is made for it or is that of all edges; and no replay leaves a trace in the next."""
    # launches and streams also tell the queue and the usual spacing of a run that goes on
    dropped = ~np.isin(graph.edge_kind, [encode_edge_kind("launch"), encode_edge_kind("stream")]) & (np.arange(len(graph.src)) % every == 0)
    edges = {name: getattr(graph, name)[~dropped] for name in ("src", "dst", "edge_kind", "lag_ns", "free_ns")}
    without = msgspec.structs.replace(graph, **edges)
    for times in (1, repeats):
        before = replay(graph, repeats=times)
        assert replay(graph, dropped_edges=dropped, repeats=times).end.tolist() == replay(without, repeats=times).end.tolist()
        assert replay(graph, repeats=times).end.tolist() == before.end.tolist()


@given(random_graphs())
def test_the_step_is_at_least_as_long_as_every_chain(graph: Graph) -> None:
    longest = np.zeros(len(graph.kind), dtype=np.int64)
    for dst in range(len(graph.kind)):
        before = longest[graph.src[graph.dst == dst]]
        longest[dst] = before.max(initial=0) + graph.duration_ns[dst]
    assert replay(graph).step_ns >= longest.max()
    # and no longer than all work and all delays one after the other
    assert replay(graph).step_ns <= graph.duration_ns.sum() + graph.lag_ns.sum() + graph.free_ns.sum()


@given(random_graphs(), st.data())
def test_taking_a_cost_away_never_lengthens(graph: Graph, data: st.DataObject) -> None:
    shares = st.lists(st.floats(0, 1), min_size=len(graph.kind), max_size=len(graph.kind))
    shorter = np.floor(graph.duration_ns * np.array(data.draw(shares)))
    dropped = np.array(data.draw(st.lists(st.booleans(), min_size=len(graph.src), max_size=len(graph.src))))
    quicker = (graph.lag_ns + graph.free_ns) // 2
    for changed in (
        replay(graph, shorter),
        replay(graph, dropped_edges=dropped),
        replay(graph, lag=quicker),
        replay(graph, shorter, quicker, dropped),
    ):
        assert (changed.end <= replay(graph).end).all()
    # of a repeated step the end of a later repetition, which the lag of the first ones cannot hide
    assert (replay(graph, shorter, quicker, dropped, repeats=4).end <= replay(graph, repeats=4).end).all()


@given(random_graphs(), st.integers(2, 5))
def test_a_step_in_a_row_is_not_longer_than_alone(graph: Graph, repeats: int) -> None:
    assert replay(graph, repeats=repeats).step_ns <= replay(graph).step_ns + 50 + graph.lag_ns.max()


def _body(wait: float, *, item: bool = True, kernel: float = 25, launches: int = 40) -> s.Program:
    forward = [s.op("aten::mm", [s.python(12), s.launch("gemm", kernel)])] * launches
    backward = [s.op("MmBackward0", [s.python(15), s.launch("gemm", kernel)])] * launches
    end = [s.item()] if item else []
    return [s.loader(wait), *forward, s.backward(backward), s.optimizer([s.op("step", [s.python(10), s.launch("adam", 5)])] * 10), *end]


def _run(body: s.Program, steps: int = 9) -> s.Simulation:
    return s.simulate([part for _ in range(steps) for part in (s.step(), *body)] + [s.step()])


def _without(kind: str) -> Callable[[Graph], float]:
    return lambda graph: steady_step_ns(graph, np.where(graph.kind == encode_node_kind(kind), 0, graph.duration_ns))


def _halved(graph: Graph) -> float:
    return steady_step_ns(graph, np.where(graph.kind == encode_node_kind("kernel"), graph.duration_ns / 2, graph.duration_ns))


def _unsynced(graph: Graph) -> float:
    """The step without its .item(): no wait, no call of its own, no copy."""
    gone = np.isin(graph.kind, [encode_node_kind("sync"), encode_node_kind("copy")])
    return steady_step_ns(graph, np.where(gone, 0, graph.duration_ns), dropped_edges=graph.edge_kind == encode_edge_kind("sync"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "good", "changed"),
    [
        (_body(900), _body(0), _without("data")),
        (_body(900, item=False), _body(0, item=False), _without("data")),
        (_body(200, kernel=60), _body(200, kernel=30), _halved),
        ([*_body(100), s.gc(700)], _body(100), _without("gc")),
        ([*_body(100), s.io(2_000)], _body(100), _without("io")),
        ([*_body(100), s.compile(700)], _body(100), _without("compile")),
        ([*_body(100), s.overhead(400)], _body(100), _without("profiler")),
        ([*_body(100), s.malloc(300)], _body(100), _without("allocation")),
        (_body(300, kernel=16), _body(300, kernel=16, item=False), _unsynced),
    ],
    ids=["loader", "loader, no sync", "kernels x 0.5", "gc", "io", "compile", "profiler", "allocation", "item"],
)
def test_a_cause_taken_away_gives_the_time_of_the_run_without_it(
    bad: s.Program, good: s.Program, changed: Callable[[Graph], float]
) -> None:
    # a run without syncs takes dozens of steps until the queue is full and its steps last as long as they go on to
    graph, true = middle(_run(bad)), float(np.median(_run(good, 60).step_ns[50:]))
    assert changed(graph) == pytest.approx(true, rel=0.02)


def test_a_run_of_the_same_steps_has_their_length() -> None:
    run = _run(_body(300))
    assert steady_step_ns(middle(run)) == pytest.approx(np.median(run.step_ns), rel=0.001)


@pytest.mark.slow
def test_the_host_runs_no_further_ahead_than_the_queue_is_long() -> None:
    """3,000 launches of 5 us, kernels of 12 us, and 20 ms of Python: it hides only what the queue of 1,024 still has to do."""
    body = [s.python(20_000), *[s.op("aten::add", [s.python(1), s.launch("k", 12)])] * 3_000]
    run = _run(body, steps=4)
    graph = middle(run)
    assert (graph.edge_kind == encode_edge_kind("queue_full")).sum() > 1_000
    true = float(np.median(run.step_ns[1:]))
    assert steady_step_ns(graph) == pytest.approx(true, rel=0.01)
    # 3,000 x 13 us of device work, and the part of the Python time that 1,024 x 13 us of queued work do not cover
    assert true == pytest.approx(39_000_000 + 20_000_000 - QUEUE_LIMIT * 13_000, rel=0.02)
    # known from the limit alone: without the measured waits the replay says the same
    without = msgspec.structs.replace(graph, free_ns=graph.free_ns * 0)
    assert steady_step_ns(without, dropped_edges=graph.edge_kind == encode_edge_kind("queue_full")) == pytest.approx(true, rel=0.02)
