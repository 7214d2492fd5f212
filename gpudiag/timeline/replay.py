"""Replay of the dependency graph: a discrete-event simulation of a step, as it was and with costs changed.

Every node begins when all that it depends on is over (max-plus algebra: Baccelli et al., Synchronization and Linearity, 1992), so that
taking a cost away never lengthens the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.model.graph import Graph, Ints, edge_kind, node_kind
from gpudiag.model.replay import ReplayedStep, ReplayTrust
from gpudiag.timeline.representatives import representatives
from gpudiag.timeline.steadiness import steadiness
from gpudiag.trace.garbage import give_back

Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float64]

REPEATS = 4
"""Repetitions of a step in a run that goes on: the first two bring the pipeline into its rhythm, the last two are measured."""

RUN = "run"
"""Role of the steps in a row that what-ifs are measured by."""

TURNS = 2
"""Repetitions of REPEATS steps or more in a row: the first one brings the pipeline into its rhythm, the last one is measured."""


AT_ONCE = 65_536
"""Nodes that stand as Python numbers at a time: they take ten times the memory of a column."""


class Replayed(NamedTuple):
    """The times of the nodes in the last repetition, in ns from the trace's base, and the time of a step in ns."""

    start: Ints
    end: Ints
    step_ns: float


class _Edges(NamedTuple):
    src: Ints
    dst: Ints
    delay: Ints


def replay(
    graph: Graph,
    duration: Numbers | None = None,
    lag: Numbers | None = None,
    dropped_edges: Bools | None = None,
    repeats: int = 1,
) -> Replayed:
    """Return the step replayed, with durations of nodes and delays of edges in ns (`lag` stands for lag_ns + free_ns) as given.

    Once: step_ns is the time from origin_ns to the end of the last node, behind the work that earlier steps had left on the device.
    Repeated: the step follows itself, the host without a break and the streams behind their own work, with at most `queue_limit` launches
    ahead; step_ns is the time by which the last two repetitions end later than those before them, over two (over one of two).
    """
    count, held = len(graph.kind), np.rint(graph.duration_ns if duration is None else duration).astype(np.int64)
    delay = np.rint(graph.lag_ns + graph.free_ns if lag is None else lag).astype(np.int64)
    kept = np.ones(len(graph.src), dtype=bool) if dropped_edges is None else ~dropped_edges
    edges = _Edges(graph.src[kept], graph.dst[kept], delay[kept])
    if repeats == 1:
        end = _ends(edges, held, graph.origin_ns)
        return Replayed(end - held, end, float(end.max(initial=graph.origin_ns) - graph.origin_ns))
    held = held.copy()
    held[_carried(graph)] = 0
    ends = _ends(_unrolled(graph, edges, graph.edge_kind[kept], repeats), np.tile(held, repeats), graph.origin_ns).reshape(repeats, count)
    last = ends.max(axis=1, initial=graph.origin_ns)
    back = 2 if repeats > 2 else 1
    return Replayed(ends[-1] - held, ends[-1], float(last[-1] - last[-1 - back]) / back)


def steady_step_ns(graph: Graph, duration: Numbers | None = None, lag: Numbers | None = None, dropped_edges: Bools | None = None) -> float:
    """Return the time of a step in ns in a run that goes on like this: the period of the graph repeated back to back, over its steps."""
    turns = REPEATS if graph.step_count < REPEATS else TURNS
    step_ns = replay(graph, duration, lag, dropped_edges, turns).step_ns / graph.step_count
    if len(graph.kind) > AT_ONCE:
        give_back()  # the columns of the repeated steps: a report replays a large graph ten times and more
    return step_ns


def replay_trust(graphs: Sequence[Graph], steps: pl.DataFrame, run: Graph | None = None) -> ReplayTrust | None:
    """Return how well the replay with nothing changed reproduces the representative steps, and `run`; None where there is no graph.

    measured_ns: from mark k to the end of what the step held (graph.end_ns); error: against that. What-ifs are measured against the steady
    time of `run`, without it of each step: how far that is off counts as an error too.
    """
    if not graphs:
        return None
    roles = representatives(steps)
    found = [_replayed_step(graph, steps, roles.get(graph.step, "median")) for graph in graphs]
    whole = None if run is None else _replayed_step(run, steps, RUN if run.step_count > 1 else roles.get(run.step, "median"))
    every = found if whole is None else [*found, whole]
    errors = [abs(step.replayed_ns - step.measured_ns) / max(step.measured_ns, 1) for step in every]
    free = max(step.free_ns / max(step.measured_ns, 1) for step in found)
    steady, drift, note = steadiness(found if whole is None else [whole])
    return ReplayTrust(tuple(found), max(*errors, steady or 0.0), free, steady, drift, note, whole)


def _replayed_step(graph: Graph, steps: pl.DataFrame, role: str) -> ReplayedStep:
    once, count, last_row = replay(graph), graph.step_count, graph.step + graph.step_count - 1
    first, last = int(steps["start_ns"][graph.step]), int(steps["end_ns"][last_row])
    earlier = (graph.start_ns + graph.duration_ns)[1 : graph.carried + 1]
    return ReplayedStep(
        name=str(steps["name"][graph.step]) if count == 1 else f"{steps['name'][graph.step]} to {steps['name'][last_row]}",
        role=role,
        measured_ns=graph.end_ns - graph.origin_ns,
        replayed_ns=round(once.step_ns),
        free_ns=free_on_path(graph, once),
        marks_ns=last - first,
        steady_ns=round(steady_step_ns(graph) * count),
        backlog_begin_ns=max(int(earlier.max(initial=first)) - first, 0),
        backlog_end_ns=max(graph.end_ns - last, 0),
    )


def free_on_path(graph: Graph, replayed: Replayed) -> int:
    """Return the free delay in ns along the longest path of `replayed` (of the graph with nothing changed)."""
    over = replayed.end[graph.src] + graph.lag_ns + graph.free_ns
    order = np.lexsort((graph.src, over, graph.dst))
    binding = np.full(len(graph.kind), -1, dtype=np.int64)
    binding[graph.dst[order]] = order  # of several writes to one place the last stays
    node, total = int(np.argmax(replayed.end)) if len(graph.kind) else -1, 0
    src, free, edge = graph.src.tolist(), graph.free_ns.tolist(), binding.tolist()
    while node >= 0 and edge[node] >= 0:
        total += free[edge[node]]
        node = src[edge[node]]
    return int(total)


def _ends(edges: _Edges, duration: Ints, origin_ns: int) -> Ints:
    """Return the end of every node. One pass over plain lists: a node takes at most two predecessors, helpers take the others."""
    count = len(duration)
    order = np.argsort(edges.dst, kind="stable")
    src, dst, delay = edges.src[order], edges.dst[order], edges.delay[order]
    many = np.bincount(dst, minlength=count)
    helpers = np.maximum(many - 2, 0)
    place = np.arange(count) + np.cumsum(helpers) + 1  # 0: the origin
    rank = np.arange(len(dst)) - (np.cumsum(many) - many)[dst]
    # helper k of a node takes the helper before it (k = 0: edge 0) and edge k + 1; the node takes the last helper and the last edge
    at = place[dst] - helpers[dst] + np.maximum(rank - 1, 0)
    size = count + int(helpers.sum()) + 1
    first, second = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    first_delay, second_delay, held = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    head = rank == 0
    first[at[head]], first_delay[at[head]] = place[src[head]], delay[head]
    second[at[~head]], second_delay[at[~head]] = place[src[~head]], delay[~head]
    chained = at[rank > 1]
    first[chained] = chained - 1
    held[place] = duration
    ends = [origin_ns]
    add = ends.append
    columns = (first, first_delay, second, second_delay, held)
    for begin in range(1, size, AT_ONCE):
        for one, one_delay, two, two_delay, own in zip(*(column[begin : begin + AT_ONCE].tolist() for column in columns), strict=True):
            t, other = ends[one] + one_delay, ends[two] + two_delay
            add((t if t > other else other) + own)
    found: Ints = np.array(ends, dtype=np.int64)[place]
    return found


def _carried(graph: Graph) -> Bools:
    """Return which nodes are work that was issued before the step."""
    number = np.arange(len(graph.kind))
    return (number >= 1) & (number <= graph.carried)


def _unrolled(graph: Graph, edges: _Edges, kinds: npt.NDArray[np.int8], repeats: int) -> _Edges:
    """Return the edges of `repeats` steps that follow each other; node i of repetition r is r * len(nodes) + i."""
    count, carried = len(graph.kind), _carried(graph)
    from_before, to_before = carried[edges.src], carried[edges.dst]
    within = ~from_before & ~to_before
    # what the step needed of earlier steps it needs of its own last repetition; the order of streams is there without
    needed = from_before & ~to_before & (kinds != edge_kind("stream"))
    twin = _twins(graph, carried)[edges.src]
    needed &= twin >= 0
    across = [(twin[needed], edges.dst[needed], edges.delay[needed]), *_seams(graph, carried)]
    parts = [(0, (edges.src[within], edges.dst[within], edges.delay[within])), *((1, seam) for seam in across)]
    parts += [(turns, _queue(graph, carried, turns)) for turns in range(repeats)]
    shifted = [_shifted(*part, turns, repeats, count) for turns, part in parts]
    return _Edges(*(np.concatenate(column) for column in zip(*shifted, strict=True)))


def _shifted(src: Ints, dst: Ints, delay: Ints, turns: int, repeats: int, count: int) -> tuple[Ints, Ints, Ints]:
    """Return edges from a repetition to the one `turns` later, for each repetition that has one."""
    later = np.arange(turns, repeats)[:, None] * count
    return (src + later - turns * count).ravel(), (dst + later).ravel(), np.tile(delay, len(later))


def _twins(graph: Graph, carried: Bools) -> Ints:
    """Return for each node issued before the step the node of the step that stands for it in a repetition; -1: none.

    The last pieces of work of a stream stand for the last pieces of work that the step before had issued there.
    """
    twins = np.full(len(carried), -1, dtype=np.int64)
    for lane in np.unique(graph.lane[carried]).tolist():
        old, own = np.flatnonzero(carried & (graph.lane == lane)), np.flatnonzero(~carried & (graph.lane == lane))
        both = min(len(old), len(own))
        if both:
            twins[old[-both:]] = own[-both:]
    return twins


def _seams(graph: Graph, carried: Bools) -> list[tuple[Ints, Ints, Ints]]:
    """Return the edges from a repetition to the next: the host goes on, and every lane keeps its order."""
    number = np.flatnonzero(~carried)
    if not len(number):
        return []
    lanes, first = np.unique(graph.lane[number], return_index=True)
    last = len(number) - 1 - np.unique(graph.lane[number][::-1], return_index=True)[1]
    spacing = np.where(lanes < 0, _spacing(graph), 0)
    seams = [(number[last], number[first], spacing)]
    if graph.last_host >= 0:
        seams.append((np.array([graph.last_host]), np.array([0]), np.array([0])))
    if graph.alone:
        seams.append((number[last], np.zeros(len(last), dtype=np.int64), np.zeros(len(last), dtype=np.int64)))
    return seams


def _spacing(graph: Graph) -> int:
    """Return the usual lag from work to work of a stream in ns."""
    lags = graph.lag_ns[graph.edge_kind == edge_kind("stream")]
    return int(np.median(lags)) if len(lags) else 0


def _issued(graph: Graph, carried: Bools) -> tuple[Ints, Ints]:
    """Return (launch node, first node of the work that it started), in the order of the launches."""
    chosen = (graph.edge_kind == edge_kind("launch")) & (graph.kind[graph.src] == node_kind("launch")) & ~carried[graph.dst]
    launch, first = np.unique(graph.src[chosen], return_index=True)
    return launch, graph.dst[chosen][first]


def _queue(graph: Graph, carried: Bools, turns: int) -> tuple[Ints, Ints, Ints]:
    """Return the edges (work, launch, delay) by which a launch waits until the work `queue_limit` launches before it can begin.

    That is when the work one further back is over. `turns`: how many steps back that lies.
    """
    launch, work = _issued(graph, carried)
    number = np.arange(len(launch))
    before = number + turns * len(launch) - graph.queue_limit - 1
    waits = (before >= 0) & (before < len(launch))
    src, dst = work[before[waits]], launch[number[waits]]
    ordered = src < dst if turns == 0 else np.ones(len(src), dtype=bool)
    return src[ordered], dst[ordered], np.zeros(int(ordered.sum()), dtype=np.int64)
