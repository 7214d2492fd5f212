"""Replay of the dependency graph: a discrete-event simulation of a step, as it was and with costs changed.

Every node begins when all that it depends on is over (max-plus algebra: Baccelli et al., Synchronization and Linearity, 1992), so that
taking a cost away never lengthens the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.arrays import Bools, Floats, Ints
from gpudiag.model.graph import Graph, encode_edge_kind, encode_node_kind
from gpudiag.model.timeline import ReplayedStep, ReplayTrust
from gpudiag.timeline.graph import find_representatives
from gpudiag.trace.table_store import release_memory
from gpudiag.units import format_ns

Numbers = Ints | Floats

REPEATS = 4
"""Repetitions of a step in a run that goes on: the first two bring the pipeline into its rhythm, the last two are measured."""

RUN = "run"
"""Role of the steps in a row that what-ifs are measured by."""

TURNS = 2
"""Repetitions of REPEATS steps or more in a row: the first one brings the pipeline into its rhythm, the last one is measured."""


class ReplayResult(NamedTuple):
    """The times of the nodes in the last repetition, in ns from the trace's base, and the time of a step in ns."""

    start: Ints
    end: Ints
    step_ns: float


class _Turn(NamedTuple):
    """One repetition of a step: what its nodes wait for, in it and in the repetitions before."""

    order: NodeOrder
    """Its edges are those of `within`, then `queued`, then one from the origin to each of `targets`."""
    within: Ints
    """Edges of the graph."""
    queued: int
    targets: Ints
    """Nodes that wait for repetitions before this one."""
    earlier: tuple[_Earlier, ...]


class _Earlier(NamedTuple):
    turns: int
    src: Ints
    target: Ints
    """Index into the targets of the turn."""
    edge: Ints | None
    """Edges of the graph that have their delay; None: they have `delay_ns`."""
    delay_ns: Ints


def replay(
    graph: Graph, duration: Numbers | None = None, lag: Numbers | None = None, dropped_edges: Bools | None = None, repeats: int = 1
) -> ReplayResult:
    """Return the step replayed, with durations of nodes and delays of edges in ns (`lag` stands for lag_ns + free_ns) as given.

    Once: step_ns is the time from origin_ns to the end of the last node, behind the work that earlier steps had left on the device.
    Repeated: the step follows itself, the host without a break and the streams behind their own work, with at most `queue_limit` launches
    ahead; step_ns is the time by which the last two repetitions end later than those before them, over two (over one of two).
    """
    held = np.rint(graph.duration_ns if duration is None else duration).astype(np.int64)
    delay = np.rint(graph.lag_ns + graph.free_ns if lag is None else lag).astype(np.int64)
    dropped = np.zeros(len(graph.src), dtype=bool) if dropped_edges is None else dropped_edges
    if repeats == 1:
        end = compute_ends(build_order(graph.src, graph.dst, len(graph.kind)), held, delay, dropped, graph.origin_ns)
        return ReplayResult(end - held, end, float(end.max(initial=graph.origin_ns) - graph.origin_ns))
    held = np.where(_find_carried(graph), 0, held)
    # `found`: the ends of the nodes in each of `repeats` steps that follow each other
    known = _TURNS.setdefault(graph, {})
    if repeats not in known:
        known[repeats] = _build_turn(graph, repeats)
    turn, found = known[repeats], list[Ints]()
    kept = np.concatenate((dropped[turn.within], np.zeros(turn.queued + len(turn.targets), dtype=bool)))
    for number in range(repeats):
        waited = np.zeros(len(turn.targets), dtype=np.int64)
        for part in turn.earlier:
            if part.turns <= number:
                over = found[number - part.turns][part.src] - graph.origin_ns
                over += part.delay_ns if part.edge is None else delay[part.edge]
                np.maximum.at(waited, part.target, over if part.edge is None else np.where(dropped[part.edge], 0, over))
        delays = np.concatenate((delay[turn.within], np.zeros(turn.queued, dtype=np.int64), waited))
        found.append(compute_ends(turn.order, held, delays, kept, graph.origin_ns))
    last = [int(end.max(initial=graph.origin_ns)) for end in found]
    back = 2 if repeats > 2 else 1
    return ReplayResult(found[-1] - held, found[-1], float(last[-1] - last[-1 - back]) / back)


def steady_step_ns(graph: Graph, duration: Numbers | None = None, lag: Numbers | None = None, dropped_edges: Bools | None = None) -> float:
    """Return the time of a step in ns in a run that goes on like this: the period of the graph repeated back to back, over its steps."""
    as_it_was = duration is None and lag is None and dropped_edges is None
    if as_it_was and (known := _AS_IT_WAS.get(graph)) is not None:
        return known
    turns = REPEATS if graph.step_count < REPEATS else TURNS
    step_ns = replay(graph, duration, lag, dropped_edges, turns).step_ns / graph.step_count
    if as_it_was:
        _AS_IT_WAS[graph] = step_ns
    if len(graph.kind) > AT_ONCE:
        release_memory()  # the columns of the repeated steps: a report replays a large graph ten times and more
    return step_ns


_AS_IT_WAS: WeakKeyDictionary[Graph, float] = WeakKeyDictionary()
"""Time of a step with nothing changed: its trust and every what-if are measured against it."""


def measure_replay_trust(graphs: Sequence[Graph], steps: pl.DataFrame, run: Graph | None = None) -> ReplayTrust | None:
    """Return how well the replay with nothing changed reproduces the representative steps, and `run`; None where there is no graph.

    measured_ns: from mark k to the end of what the step held (graph.end_ns); error: against that. What-ifs are measured against the steady
    time of `run`, without it of each step: how far that is off counts as an error too.
    """
    if not graphs:
        return None
    roles = find_representatives(steps)
    found = [_replay_step(graph, steps, roles.get(graph.step, "median")) for graph in graphs]
    whole = None if run is None else _replay_step(run, steps, RUN if run.step_count > 1 else roles.get(run.step, "median"))
    every = found if whole is None else [*found, whole]
    errors = [abs(step.replayed_ns - step.measured_ns) / max(step.measured_ns, 1) for step in every]
    free = max(step.free_ns / max(step.measured_ns, 1) for step in found)
    steady, drift, note = measure_steadiness(found if whole is None else [whole])
    return ReplayTrust(tuple(found), max(*errors, steady or 0.0), free, steady, drift, note, whole)


def _replay_step(graph: Graph, steps: pl.DataFrame, role: str) -> ReplayedStep:
    once, count, last_row = replay(graph), graph.step_count, graph.step + graph.step_count - 1
    first, last = int(steps["start_ns"][graph.step]), int(steps["end_ns"][last_row])
    earlier = (graph.start_ns + graph.duration_ns)[1 : graph.carried + 1]
    return ReplayedStep(
        name=str(steps["name"][graph.step]) if count == 1 else f"{steps['name'][graph.step]} to {steps['name'][last_row]}",
        role=role,
        measured_ns=graph.end_ns - graph.origin_ns,
        replayed_ns=round(once.step_ns),
        free_ns=measure_free_delay(graph, once),
        marks_ns=last - first,
        steady_ns=round(steady_step_ns(graph) * count),
        backlog_begin_ns=max(int(earlier.max(initial=first)) - first, 0),
        backlog_end_ns=max(graph.end_ns - last, 0),
    )


def measure_free_delay(graph: Graph, replayed: ReplayResult) -> int:
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


def _find_carried(graph: Graph) -> Bools:
    number = np.arange(len(graph.kind))
    return (number >= 1) & (number <= graph.carried)


_TURNS: WeakKeyDictionary[Graph, dict[int, _Turn]] = WeakKeyDictionary()
"""What the replays of a graph share, by the number of repetitions: a report replays a large graph ten times and more."""


def _build_turn(graph: Graph, repeats: int) -> _Turn:
    carried = _find_carried(graph)
    from_before, to_before = carried[graph.src], carried[graph.dst]
    within = np.flatnonzero(~from_before & ~to_before)
    # what the step needed of earlier steps it needs of its own last repetition; the order of streams is there without
    # For each node issued before the step the node of the step that stands for it in a repetition; -1: none. The last pieces of work of a
    # stream stand for the last pieces of work that the step before had issued there
    twins = np.full(len(carried), -1, dtype=np.int64)
    for lane in np.unique(graph.lane[carried]).tolist():
        old, own = np.flatnonzero(carried & (graph.lane == lane)), np.flatnonzero(~carried & (graph.lane == lane))
        both = min(len(old), len(own))
        if both:
            twins[old[-both:]] = own[-both:]
    twin = twins[graph.src]
    needed = np.flatnonzero(from_before & ~to_before & (graph.edge_kind != encode_edge_kind("stream")) & (twin >= 0))
    earlier = [_Earlier(1, twin[needed], graph.dst[needed], needed, np.zeros(len(needed), dtype=np.int64))]
    # From a repetition to the next the host goes on, and every lane keeps its order
    number = np.flatnonzero(~carried)
    if len(number):
        lanes, begins = np.unique(graph.lane[number], return_index=True)
        last = number[len(number) - 1 - np.unique(graph.lane[number][::-1], return_index=True)[1]]
        lags = graph.lag_ns[graph.edge_kind == encode_edge_kind("stream")]
        spacing = np.where(lanes < 0, int(np.median(lags)) if len(lags) else 0, 0)
        earlier.append(_Earlier(1, last, number[begins], None, spacing))
        if graph.last_host >= 0:
            earlier.append(_Earlier(1, np.array([graph.last_host]), np.array([0]), None, np.array([0])))
        if graph.alone:
            earlier.append(_Earlier(1, last, np.zeros(len(last), dtype=np.int64), None, np.zeros(len(last), dtype=np.int64)))
    # (launch node, first node of the work that it started), in the order of the launches
    chosen = (graph.edge_kind == encode_edge_kind("launch")) & (graph.kind[graph.src] == encode_node_kind("launch")) & ~carried[graph.dst]
    launch, first = np.unique(graph.src[chosen], return_index=True)
    issued = (launch, graph.dst[chosen][first])
    for turns in range(1, repeats):
        src, dst = _build_queue_edges(graph, *issued, turns)
        earlier.append(_Earlier(turns, src, dst, None, np.zeros(len(src), dtype=np.int64)))
    targets = np.unique(np.concatenate([part.target for part in earlier]))
    src, dst = _build_queue_edges(graph, *issued, 0)
    sources = np.concatenate((graph.src[within], src, np.full(len(targets), ORIGIN)))
    order = build_order(sources, np.concatenate((graph.dst[within], dst, targets)), len(graph.kind))
    placed = tuple(part._replace(target=np.searchsorted(targets, part.target)) for part in earlier if len(part.src))
    return _Turn(order, within, len(src), targets, placed)


def _build_queue_edges(graph: Graph, launch: Ints, work: Ints, turns: int) -> tuple[Ints, Ints]:
    """Return the edges (work, launch) by which a launch waits until the work `queue_limit` launches before it can begin.

    That is when the work one further back is over. `launch`, `work`: each launch and the first work that it started. `turns`: how many
    steps back that lies.
    """
    number = np.arange(len(launch))
    before = number + turns * len(launch) - graph.queue_limit - 1
    waits = (before >= 0) & (before < len(launch))
    src, dst = work[before[waits]], launch[number[waits]]
    ordered = src < dst if turns == 0 else np.ones(len(src), dtype=bool)
    return src[ordered], dst[ordered]


Places = npt.NDArray[np.int32]

ORIGIN = -1
"""As the source of an edge: the begin of the step, which is over at origin_ns."""

AT_ONCE = 65_536
"""Nodes that stand as Python numbers at a time: they take ten times the memory of a column."""


class NodeOrder(NamedTuple):
    """Places in the order of the nodes, 0 being the origin. A place takes two others at most; helpers take what a node has more.

    first, second: place that it takes; first_edge, second_edge: edge by which it does, -1: none (it is free, and has no delay).
    """

    place: Places
    """Of each node."""
    first: Places
    first_edge: Places
    second: Places
    second_edge: Places


def build_order(src: Ints, dst: Ints, count: int) -> NodeOrder:
    """Return the order of `count` nodes (topological: src < dst for every edge; src may be ORIGIN)."""
    edges = np.argsort(dst, kind="stable").astype(np.int32)
    src, dst = src[edges], dst[edges]
    many = np.bincount(dst, minlength=count)
    helpers = np.maximum(many - 2, 0)
    place = np.append(np.arange(count) + np.cumsum(helpers) + 1, 0).astype(np.int32)  # the last one: that of ORIGIN
    rank = np.arange(len(dst)) - (np.cumsum(many) - many)[dst]
    # helper k of a node takes the helper before it (k = 0: edge 0) and edge k + 1; the node takes the last helper and the last edge
    at = place[dst] - helpers[dst] + np.maximum(rank - 1, 0)
    size = count + int(helpers.sum()) + 1
    found = NodeOrder(place[:count], *(np.full(size, value, dtype=np.int32) for value in (0, -1, 0, -1)))
    head, chained = rank == 0, at[rank > 1]
    found.first[at[head]], found.first_edge[at[head]] = place[src[head]], edges[head]
    found.second[at[~head]], found.second_edge[at[~head]] = place[src[~head]], edges[~head]
    found.first[chained] = chained - 1
    return found


def compute_ends(order: NodeOrder, duration: Ints, delay: Ints, dropped: Bools, origin_ns: int) -> Ints:
    """Return the end of every node in ns: it begins when the edges that are not `dropped` are over, at `origin_ns` at the earliest."""
    delay, dropped = np.append(np.where(dropped, 0, delay), 0), np.append(dropped, False)  # the last ones: those of no edge
    held = np.zeros(len(order.first), dtype=np.int64)
    held[order.place] = duration
    found = [origin_ns]
    add = found.append
    for begin in range(1, len(held), AT_ONCE):
        part = slice(begin, begin + AT_ONCE)
        taken = [
            column
            for places, edges in ((order.first[part], order.first_edge[part]), (order.second[part], order.second_edge[part]))
            for column in (np.where(dropped[edges], 0, places).tolist(), delay[edges].tolist())
        ]
        for one, one_delay, two, two_delay, own in zip(*taken, held[part].tolist(), strict=True):
            t, other = found[one] + one_delay, found[two] + two_delay
            add((t if t > other else other) + own)
    result: Ints = np.array(found, dtype=np.int64)[order.place]
    return result


WORTH_WORDS = 0.05
"""A step that differs by less than this share from the recorded one needs no words."""


def measure_steadiness(steps: Sequence[ReplayedStep]) -> tuple[float | None, float | None, str]:
    """Return steady_error_share, drift_share and note of a ReplayTrust; None, None and '' where the times between marks are not known."""
    errors, drifts = [], []
    for step in steps:
        if step.marks_ns and step.steady_ns is not None:
            grown = (step.backlog_end_ns or 0) - (step.backlog_begin_ns or 0)
            drifts.append((abs(step.steady_ns - step.marks_ns) / step.marks_ns, step.name, step))
            errors.append(min(abs(step.steady_ns - step.marks_ns), abs(step.steady_ns - step.marks_ns - grown)) / step.marks_ns)
    if not drifts:
        return None, None, ""
    drift, _, worst = max(drifts, key=lambda row: row[:2])
    if drift <= WORTH_WORDS:
        return max(errors), drift, ""
    # Why the step, or the steps of a run, last otherwise in a run that goes on like it
    like = "where every step is like it, one takes" if worst.role != RUN else "in a run that goes on they take"
    marks, steady = format_ns(worst.marks_ns or 0), format_ns(worst.steady_ns or 0)
    begin, end = worst.backlog_begin_ns or 0, worst.backlog_end_ns or 0
    if begin == end:
        return max(errors), drift, f"{worst.name} took {marks} from mark to mark; {like} {steady}, for they overlap"
    ahead = "the host ran ahead" if end > begin else "the device caught up"
    behind = f"the device was {format_ns(begin)} behind the host when it began and {format_ns(end)} when it ended"
    return max(errors), drift, f"{worst.name} took {marks} from mark to mark while {ahead} ({behind}); {like} {steady}"
