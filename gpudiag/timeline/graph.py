"""The dependency graphs of steps, one by one or in a row: host threads, streams, and what each piece waited for.

What a graph reproduces is the time from mark k (`origin_ns`) to `end_ns`: the later of mark k+1 and the end of the last work that the step
issued, or that earlier steps had left on the device. Work of earlier steps comes first in the graph, with its measured times.

Normal latencies are the recording's own (graph_work). Where the measured start lies behind all that a node depends on by more than the
tolerance for noise, the rest is kept as the free delay of the edge that was over last; smaller residues are not kept, so that the replay
of an unchanged graph has an honest error."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Ints
from gpudiag.attribution.intervals import Spans, build_spans
from gpudiag.model.graph import Graph, encode_node_kind
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.model.trace import Trace
from gpudiag.timeline.graph_device import (
    DeviceNodes,
    Edges,
    build_edges,
    build_event_edges,
    build_stream_edges,
    find_device_nodes,
    join_edges,
)
from gpudiag.timeline.graph_host import (
    NODE_CAUSES,
    Calls,
    Causes,
    Nodes,
    ThreadActivity,
    build_chain,
    find_calls,
    find_collectives,
    find_op_pieces,
    find_step_thread,
    find_thread_waits,
    find_unexplained,
    read_activity,
)
from gpudiag.timeline.graph_latencies import DeviceWork, NormalLatencies, estimate_normal_latencies, estimate_tolerance, read_device_work
from gpudiag.timeline.host_events import find_host_events, find_own_frames
from gpudiag.timeline.launch_queue import CLOCK_NS, estimate_queue_limit, find_issued_launches
from gpudiag.trace.table_store import release_memory

MAX_NODES = 200_000
"""A larger step is not replayed: a report replays each step some fifty times."""

MAX_THREADS = 64
"""Host threads of one graph: training uses a handful, only a hostile file has more."""

MAX_SPAN_NS, MAX_LANES = 24 * 3600 * 10**9, 10_000
"""A recording of more than a day has a broken time stamp, one of more streams or threads no device (both keep sums within 64 bits)."""


class _Run(NamedTuple):
    trace: Trace
    work: DeviceWork
    normal: NormalLatencies
    queue_limit: int
    calls: Calls
    causes: Causes
    shown: dict[int, ThreadActivity]
    one_step: bool
    """The recording holds no second step, which would show how one follows the other."""
    on_cpu: bool
    collectives: dict[int, Spans]
    """CPU-only runs: the collectives that each host thread runs (gloo)."""


def build_all_graphs(
    trace: Trace,
    steps: pl.DataFrame,
    idle: pl.DataFrame,
    syncs: pl.DataFrame,
    on_cpu: bool,
    host_marks: pl.DataFrame | None = None,
    events: pl.DataFrame | None = None,
) -> tuple[tuple[Graph, ...], Graph | None]:
    """Return the graphs of the fastest, the median and the slowest analysed step, in order of time; others: see explain_missing_graph.

    And the graph of consecutive steps in the order in which they ran (see find_consecutive_steps; None: too few fit).
    `host_marks`: the bundle's; without them a collection or a write that the device outlasts is plain host time. `events`: host_events of
    `trace` and `host_marks`, where others ask for them too.
    """
    chosen = [row for row in sorted(find_representatives(steps)) if explain_missing_graph(trace, steps, row, on_cpu=on_cpu) is None]
    if not chosen:
        return (), None
    if events is None:
        events = find_host_events(trace, find_own_frames(trace), host_marks, on_cpu=on_cpu)
    run = _prepare_run(trace, steps, syncs, on_cpu, idle, events)
    release_memory()  # what was made on the way, before the graphs themselves
    built = [_build_graph(run, row, int(steps["start_ns"][row]), int(steps["end_ns"][row])) for row in chosen]
    graphs = tuple(graph for graph in built if graph is not None)
    release_memory()
    if not graphs:
        return graphs, None
    rows = find_consecutive_steps(steps, _count_nodes(trace, steps, on_cpu=on_cpu))
    if rows is None:
        return graphs, None
    first, last = rows
    if first == last:
        return graphs, next((graph for graph in graphs if graph.step == first), None)
    return graphs, _build_consecutive(run, steps, first, last)


def build_step_graphs(
    trace: Trace, steps: pl.DataFrame, idle: pl.DataFrame, syncs: pl.DataFrame, on_cpu: bool, host_marks: pl.DataFrame | None = None
) -> Iterator[Graph]:
    """Yield the graphs of all analysed steps, as many consecutive ones together as can be replayed; what is too large is left out.

    For recordings of which `build_all_graphs` finds graphs.
    """
    run = _prepare_run(trace, steps, syncs, on_cpu, idle, find_host_events(trace, find_own_frames(trace), host_marks, on_cpu=on_cpu))
    for first, last in split_steps(steps, _count_nodes(trace, steps, on_cpu=on_cpu)):
        graph = _build_consecutive(run, steps, first, last)
        if graph is not None:
            yield graph


def _build_consecutive(run: _Run, steps: pl.DataFrame, first: int, last: int) -> Graph | None:
    graph = _build_graph(run, first, int(steps["start_ns"][first]), int(steps["end_ns"][last]))
    begins = tuple(steps["start_ns"][first + 1 : last + 1].to_list())
    return None if graph is None else msgspec.structs.replace(graph, begins_ns=begins)


def _count_nodes(trace: Trace, steps: pl.DataFrame, *, on_cpu: bool) -> Ints:
    host = trace.ops.drop_nulls("thread") if on_cpu else trace.launches  # an op or a call makes two nodes
    starts = [host["start_ns"], host["start_ns"], *([] if on_cpu else [trace.kernels["start_ns"]])]
    return count_events([times.to_numpy() for times in starts], steps)


def _prepare_run(trace: Trace, steps: pl.DataFrame, syncs: pl.DataFrame, on_cpu: bool, idle: pl.DataFrame, events: pl.DataFrame) -> _Run:
    work = read_device_work(trace) if not on_cpu else read_device_work(msgspec.structs.replace(trace, kernels=trace.kernels.clear()))
    queued = find_issued_launches(work.launch, work.start, trace.launches["start_ns"].to_numpy(), trace.launches["end_ns"].to_numpy())
    limit = estimate_queue_limit(queued, syncs["launch"].drop_nulls().to_numpy())
    normal = estimate_normal_latencies(work, syncs, queued, limit)
    # The causes of host time: as the events show it, and where idle time was explained so; and where nothing explains it
    shown = read_activity(trace)
    known = pl.concat([frame.select("thread", "start_ns", "end_ns", "cause") for frame in (events, idle)])
    known = known.with_columns(pl.col("cause").str.strip_prefix("idle_")).filter(pl.col("cause").is_in(NODE_CAUSES[:-1]))
    causes = {(thread, str(cause)): build_spans(spans) for (thread, cause), spans in known.group_by("thread", "cause")}
    return _Run(
        trace=trace,
        work=work,
        normal=normal,
        queue_limit=limit,
        calls=find_calls(trace, work, syncs, normal, queued, limit),
        causes=causes | find_unexplained(shown, idle, framed=trace.frames.height > 0),
        shown=shown,
        one_step=steps.height == 1,
        on_cpu=on_cpu,
        collectives=find_collectives(trace) if on_cpu else {},
    )


def list_graph_notices(trace: Trace, steps: pl.DataFrame, *, on_cpu: bool) -> tuple[Notice, ...]:
    """Return for each representative step that has no graph why it is not replayed."""
    reasons = [explain_missing_graph(trace, steps, row, on_cpu=on_cpu) for row in sorted(find_representatives(steps))]
    return tuple(reason for reason in reasons if reason is not None)


def explain_missing_graph(trace: Trace, steps: pl.DataFrame, row: int, *, on_cpu: bool) -> Notice | None:
    """Return why the step has no graph; None where it has one."""
    step = str(steps["name"][row])
    inside = (pl.col("start_ns") < int(steps["end_ns"][row])) & (pl.col("end_ns") > int(steps["start_ns"][row]))
    events = trace.ops.drop_nulls("thread") if on_cpu else trace.launches
    held = [frame.select(inside.sum()).item() or 0 for frame in (events, *(() if on_cpu else (trace.kernels,)))]
    count = 2 * held[0] + sum(held[1:])
    if count > MAX_NODES:
        return make_notice(NoticeCode.NOT_REPLAYED_SIZE, step=step, count=count, limit=MAX_NODES)
    # Times that lie too far apart, or too many streams and threads, cannot be sorted as one
    frames = [frame for frame in (trace.ops, trace.launches, trace.kernels, trace.marks, steps) if frame.height]
    first = min((int(frame["start_ns"].min()) for frame in frames), default=0)  # type: ignore[arg-type]
    last = max((int(frame["end_ns"].max()) for frame in frames), default=0)  # type: ignore[arg-type]
    if last - first > MAX_SPAN_NS or max(trace.kernels["stream"].n_unique(), len(trace.meta.threads)) > MAX_LANES:
        return make_notice(NoticeCode.NOT_REPLAYED_SPAN, step=step, limit=MAX_LANES)
    if on_cpu:
        return None if count else make_notice(NoticeCode.NOT_REPLAYED_NO_OP, step=step)
    if not trace.kernels["launch"].is_not_null().any():
        return make_notice(NoticeCode.NOT_REPLAYED_NO_LAUNCH, step=step)
    return None


def _build_graph(run: _Run, step: int, origin: int, end: int) -> Graph | None:
    main = find_step_thread(run.trace, run.shown, origin, end)
    if main is None:
        return None
    # Mark k+1, or where the recording of the host ends before it: what follows is not host time
    marks = run.trace.marks.filter((pl.col("thread") == main) & (pl.col("category") == "annotation"))["end_ns"].max()
    shown = [int(thread.edges[-1]) for thread in run.shown.values() if len(thread.edges)]
    last = max([*shown, int(marks) if isinstance(marks, int) else origin])
    window = (origin, max(min(end, last), origin + 1))
    # The threads that do work of the step, the busiest: those that launch, on a CPU those whose ops are the work
    if run.on_cpu:
        inside = run.trace.kernels.filter((pl.col("start_ns") < window[1]) & (pl.col("end_ns") > window[0]))["op"].drop_nulls()
        called = run.trace.ops["thread"].gather(inside).drop_nulls().to_numpy()
    else:
        called = run.work.thread[(run.work.call_start >= window[0]) & (run.work.call_start < window[1]) & (run.work.thread >= 0)]
    threads, counts = np.unique(called, return_counts=True)
    workers = set(threads[np.argsort(-counts, kind="stable")][:MAX_THREADS].tolist())
    covered, handoffs = find_thread_waits(run.shown, main, workers, window, run.collectives)
    pieces = find_op_pieces(run.trace, window, on_cpu=run.on_cpu)
    chains = {thread: build_chain(thread, spans, run.calls, pieces, run.causes) for thread, spans in covered.items()}
    streams = sorted(set(run.work.stream.tolist()))
    firsts = np.cumsum([1, *(len(chain.kind) for chain in chains.values())])
    device = find_device_nodes(run.work, window, {stream: number for number, stream in enumerate(streams)}, int(firsts[-1]))
    begin = Nodes(*(np.array([value]) for value in (encode_node_kind("host"), main, origin, origin, -1, -1, -1)))
    nodes = Nodes(*(np.concatenate(columns) for columns in zip(begin, *chains.values(), device.nodes, strict=True)))
    del pieces, chains
    edges = _build_edges(run, nodes, device, handoffs)
    graph = _order_nodes(step, nodes, edges, device, tuple(streams), last_host=int(firsts[1]) - 1)
    return msgspec.structs.replace(graph, queue_limit=run.queue_limit, alone=run.one_step)


def _build_edges(run: _Run, nodes: Nodes, device: DeviceNodes, handoffs: list[tuple[int, int, int]]) -> Edges:
    host = np.arange(1, device.first)
    same = nodes.lane[host[1:]] == nodes.lane[host[:-1]]
    threads = build_edges(host[:-1][same], host[1:][same], "thread", 0)
    # The edges by which one thread goes on when another is done
    src, dst = [], []
    rows = {int(lane): np.flatnonzero(nodes.lane[1 : device.first] == lane) + 1 for lane in np.unique(nodes.lane[: device.first])}
    for taker, giver, moment in handoffs:
        before = np.searchsorted(nodes.end[rows[giver]], moment, "right") - 1 if giver in rows else -1
        after = np.searchsorted(nodes.start[rows[taker]], moment, "left") if taker in rows else 0
        if before >= 0 and taker in rows and after < len(rows[taker]):
            src.append(int(rows[giver][before]))
            dst.append(int(rows[taker][after]))
    passed = build_edges(np.array(src, dtype=np.int64), np.array(dst, dtype=np.int64), "handoff", 0)
    # From a call to its work, with the normal latency of such a launch
    call = np.full(run.trace.launches.height + 1, -1, dtype=np.int64)
    launching = np.flatnonzero(nodes.kind[: device.first] == encode_node_kind("launch"))
    call[nodes.launch[launching]] = launching
    caller = call[run.work.launch[device.rows]]
    started = np.flatnonzero((caller >= 0) & ~device.carried & (run.work.launch[device.rows] >= 0))
    issued = build_edges(caller[started], started + device.first, "launch", run.normal.launch[run.work.around[device.rows[started]]])
    ordered = build_stream_edges(device, run.work, run.normal)
    waiting = _build_wait_edges(run, nodes, device)
    # When launch and stream let each piece begin: a start that they do not explain waited for an event
    known = join_edges([issued, ordered])
    ready = np.full(len(nodes.kind), nodes.start[0])
    np.maximum.at(ready, known.dst, nodes.end[known.src] + known.lag)
    events = build_event_edges(device, run.work, run.trace.launches, ready[device.first :])
    found = join_edges([threads, passed, issued, ordered, waiting, events])
    # What waits for nothing waits for the begin of the step
    free = np.ones(len(nodes.kind), dtype=bool)
    free[0] = free[found.dst] = False
    late = np.flatnonzero(free)
    late = late[(nodes.start[late] > nodes.start[0]) | (late < device.first)]
    roots = [build_edges(np.zeros(int(part.sum()), dtype=np.int64), late[part], kind, 0)
             for kind, part in (("thread", late < device.first), ("stream", late >= device.first))]  # fmt: skip
    return join_edges([found, *roots])


def _build_wait_edges(run: _Run, nodes: Nodes, device: DeviceNodes) -> Edges:
    """Return work -> call that waits for it: syncs, and launches that found the queue full."""
    position = np.full(len(run.work.start) + 1, -1, dtype=np.int64)
    position[device.rows] = np.arange(len(device.rows)) + device.first
    parts = []
    for kind, edge, lag in (("sync", "sync", run.normal.sync_return), ("allocation", "sync", 0), ("launch", "queue_full", 0)):
        waits = np.full(run.trace.launches.height + 1, -1, dtype=np.int64)
        chosen = (run.calls.kind == encode_node_kind(kind)) & (run.calls.kernel >= 0)
        waits[run.calls.launch[chosen]] = run.calls.kernel[chosen]
        calls = np.flatnonzero(nodes.kind[: device.first] == encode_node_kind(kind))
        src = position[waits[nodes.launch[calls]]]
        # One call may be cut into several nodes: the last one is the return. The clocks let the work end shortly after it
        early = np.minimum(nodes.start[calls] - nodes.end[src], 0)
        fits = (src >= 0) & (early >= -CLOCK_NS)
        parts.append(build_edges(src[fits], calls[fits], edge, np.where(early < 0, early, lag)[fits]))
    return join_edges(parts)


def _order_nodes(step: int, nodes: Nodes, edges: Edges, device: DeviceNodes, streams: tuple[int, ...], last_host: int) -> Graph:
    """Return the graph with its nodes in topological order: the begin, what was carried over, the rest by measured start."""
    rank = np.full(len(nodes.kind), 2)
    rank[0], rank[device.first :][device.carried] = 0, 1
    order = np.lexsort((nodes.end, nodes.start, rank))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    edges = edges._replace(src=place[edges.src], dst=place[edges.dst])
    edges = Edges(*(column[edges.src < edges.dst] for column in edges))
    nodes = Nodes(*(column[order] for column in nodes))
    # The free delay of each edge: what lies between it and the start of its node, where it was over last and noise is exceeded
    over = nodes.end[edges.src] + edges.lag
    by_end = np.lexsort((over, edges.dst))
    binding = np.full(len(nodes.kind), -1, dtype=np.int64)
    binding[edges.dst[by_end]] = by_end  # of several writes to one place the last stays
    bound = binding[binding >= 0]
    rest = nodes.start[edges.dst[bound]] - over[bound]
    free = np.zeros(len(edges.src), dtype=np.int64)
    free[bound] = np.where(rest > estimate_tolerance(edges.lag[bound]), rest, 0)
    return Graph(
        step=step,
        kind=nodes.kind.astype(np.int8),
        lane=nodes.lane,
        streams=streams,
        start_ns=nodes.start,
        duration_ns=nodes.end - nodes.start,
        kernel=nodes.kernel,
        launch=nodes.launch,
        op=nodes.op,
        src=edges.src,
        dst=edges.dst,
        edge_kind=edges.kind.astype(np.int8),
        lag_ns=edges.lag,
        free_ns=free,
        origin_ns=int(nodes.start[0]),
        end_ns=int(nodes.end.max()),
        last_host=int(place[last_host]),
        carried=int(device.carried.sum()),
    )


def find_representatives(steps: pl.DataFrame) -> dict[int, str]:
    """Return the role of each representative step by its row of `steps`: fastest, median, slowest; joined where one step is several.

    The median is the lower one of an even number; of equal steps the earlier counts as faster.
    """
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("length")
    order = steps.filter("analysed").sort(length, "start_ns")["id"].to_list()
    if not order:
        return {}
    roles: dict[int, list[str]] = {}
    for role, place in (("fastest", 0), ("median", (len(order) - 1) // 2), ("slowest", len(order) - 1)):
        roles.setdefault(order[place], []).append(role)
    return {row: ", ".join(names) for row, names in roles.items()}


MAX_CONSECUTIVE_NODES = 150_000
"""Nodes of all steps together: a report replays them some fifty times, at a tenth of a second each."""

LEAST_CONSECUTIVE_STEPS = 3
"""Fewer consecutive steps show nothing of how costs alternate: the representative ones are then the better sample."""


def count_events(trace_events: list[Ints], steps: pl.DataFrame) -> Ints:
    """Return for each step how many of the events (starts in ns, one array a kind) begin in it."""
    start, end = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    found = np.zeros(steps.height, dtype=np.int64)
    for times in trace_events:
        ordered = np.sort(times)
        found += np.searchsorted(ordered, end) - np.searchsorted(ordered, start)
    return found


def split_steps(steps: pl.DataFrame, count: Ints, most: int = MAX_CONSECUTIVE_NODES) -> list[tuple[int, int]]:
    """Return (first, last) of stretches of analysed steps that touch and have at most `most` nodes; `count`: nodes of each.

    A step with more stands alone, and is left out above MAX_NODES.
    """
    start, end = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    found: list[tuple[int, int]] = []
    held = 0
    for row in np.flatnonzero(steps["analysed"].to_numpy() & (count <= MAX_NODES)).tolist():
        if found and found[-1][1] == row - 1 and end[row - 1] == start[row] and held + count[row] <= most:
            found[-1] = (found[-1][0], row)
            held += int(count[row])
        else:
            found.append((row, row))
            held = int(count[row])
    return found


def find_consecutive_steps(steps: pl.DataFrame, count: Ints, most: int = MAX_CONSECUTIVE_NODES) -> tuple[int, int] | None:
    """Return the first and the last row of the steps to replay together; `count`: nodes of each. None: too few fit.

    The longest stretch of analysed steps that touch; where it has more nodes than `most`, that part of it with as many steps as fit whose
    mean length is nearest to that of all analysed steps.
    """
    start, end, analysed = (steps[name].to_numpy() for name in ("start_ns", "end_ns", "analysed"))
    rows = np.flatnonzero(analysed)
    if not len(rows):
        return None
    apart = np.flatnonzero((np.diff(rows) > 1) | (start[rows[1:]] != end[rows[:-1]]))
    firsts, lasts = rows[np.append(0, apart + 1)], rows[np.append(apart, len(rows) - 1)]
    longest = int(np.argmax(end[lasts] - start[firsts]))
    first, last = int(firsts[longest]), int(lasts[longest])
    length = end - start
    nodes, time = (np.concatenate(([0], np.cumsum(column[first : last + 1]))) for column in (count, length))
    many = bisect_right(range(1, len(nodes)), most, key=lambda many: int((nodes[many:] - nodes[:-many]).min()))  # more steps, more nodes
    if many < min(LEAST_CONSECUTIVE_STEPS, len(nodes) - 1):
        return None
    off = np.abs((time[many:] - time[:-many]) / many - length[analysed].mean())
    off[nodes[many:] - nodes[:-many] > most] = np.inf
    place = first + int(np.argmin(off))
    return place, place + many - 1
