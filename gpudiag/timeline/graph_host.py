"""The host threads of a step as chains of nodes: when each works for the step, its calls, and the time between them by its cause."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Ints, sort_distinct
from gpudiag.attribution import intervals
from gpudiag.attribution.names import decode_column, match_column
from gpudiag.attribution.nesting import find_self_spans, nest, null_missing
from gpudiag.model.graph import encode_node_kind
from gpudiag.model.trace import Trace
from gpudiag.timeline.graph_latencies import NEVER, QUEUE_PENDING, DeviceWork, NormalLatencies, accumulate_maximum, count_pending
from gpudiag.timeline.launch_queue import CLOCK_NS, IssuedLaunches
from gpudiag.trace.kernel_names import ALLOCATION_CALL, LOADER_MARK, OPTIMIZER_MARK, STEP_MARK

SILENT_NS = 20_000
"""A thread that shows nothing for less than this is between two ops, not waiting."""

FILLED_SHARE = 0.5
"""Share of a silent stretch that another thread must fill with its work to be what was waited for: waking it takes tens of us."""

BURST_GAP_NS = 100_000
"""Events of an independent thread that are further apart than this are separate pieces of work."""


class ThreadActivity(NamedTuple):
    """What a thread shows: starts and ends of its events, each sorted, and both together."""

    starts: Ints
    ends: Ints
    edges: Ints

    def depth(self, t: Ints) -> Ints:
        """Return how many events are open at each moment."""
        found: Ints = np.searchsorted(self.starts, t, "right") - np.searchsorted(self.ends, t, "right")
        return found

    def inside(self, first: int, last: int) -> Ints:
        """Return the edges within (first, last)."""
        found: Ints = self.edges[np.searchsorted(self.edges, first, "right") : np.searchsorted(self.edges, last, "left")]
        return found

    def find_silences(self, covered: intervals.Spans) -> intervals.Spans:
        """Return the stretches of `covered` in which the thread shows nothing."""
        found = [intervals.NO_SPANS]
        for first, last in covered.tolist():
            edges = np.concatenate(([first], self.inside(first, last), [last]))
            long = np.flatnonzero(np.diff(edges) > SILENT_NS)
            found.append(np.stack((edges[long], edges[long + 1]), axis=1))
        return np.concatenate(found)


def read_activity(trace: Trace) -> dict[int, ThreadActivity]:
    """Return what each thread of `trace` shows in ops and runtime calls."""
    columns = ("thread", "start_ns", "end_ns")
    events = pl.concat([trace.ops.select(columns), trace.launches.select(columns)], rechunk=False)
    found = {}
    for thread in events["thread"].drop_nulls().unique().sort():
        rows = events.filter(pl.col("thread") == thread).drop_nulls()
        starts, ends = np.sort(rows["start_ns"].to_numpy()), np.sort(rows["end_ns"].to_numpy())
        found[int(thread)] = ThreadActivity(starts, ends, sort_distinct(np.concatenate((starts, ends))))
    return found


def find_unexplained(shown: dict[int, ThreadActivity], idle: pl.DataFrame, *, framed: bool) -> Causes:
    """Return when each thread showed nothing while the device had no work and nothing tells why (`idle`: the table).

    With what lies around it up to where the thread shows something or idle time has a cause: what the thread did before the device ran dry
    is no better known, unless Python frames tell (`framed`).
    """
    late, unexplained = pl.col("kind").is_in(["host_wait", "edge"]), pl.col("cause") == "idle_unexplained"
    spans = intervals.build_spans(idle.filter(late & unexplained & (pl.col("end_ns") - pl.col("start_ns") > SILENT_NS)))
    caused = intervals.build_spans(idle.filter(~unexplained))
    found: Causes = {}
    for thread, events in shown.items():
        edges = sort_distinct(np.concatenate((spans[:1, 0], events.edges, spans[-1:, 1])))
        long = np.flatnonzero(np.diff(edges) > SILENT_NS)  # the depth of all edges takes the most memory of a report
        silent = np.stack((edges[long], edges[long + 1]), axis=1)[events.depth(edges[long]) == 0]
        known = intervals.subtract_spans(silent, spans) if framed else caused
        silent = intervals.subtract_spans(silent, known)
        found[thread, "unexplained"] = silent[intervals.find_meeting(silent, spans)]
    return found


def find_step_thread(trace: Trace, shown: dict[int, ThreadActivity], origin: int, end: int) -> int | None:
    """Return the thread that steps: that of the step's marks, else of optimizer or loader marks, else the one that is active longest.

    Of ops those of autograd's thread (with a forward thread of their own) do not speak for a thread. None: no thread shows anything.
    """
    inside = trace.marks.filter((pl.col("category") == "annotation") & (pl.col("start_ns") < end) & (pl.col("end_ns") > origin))
    inside = inside.drop_nulls("thread").with_columns(decode_column("name"))
    for pattern in (STEP_MARK, OPTIMIZER_MARK, LOADER_MARK):
        found = inside.filter(pl.col("name").str.contains(pattern))
        if found.height:
            return int(found["thread"][0])
    backward = set(trace.ops.filter(pl.col("fwd_thread") > 0)["thread"].drop_nulls().unique().to_list())
    extents = []
    for thread, events in shown.items():
        edges = events.inside(origin - 1, end + 1)
        if len(edges):
            extents.append((thread not in backward, int(edges[-1] - edges[0]), len(edges), thread))
    return max(extents)[3] if extents else None


def find_thread_waits(
    shown: dict[int, ThreadActivity],
    main: int,
    workers: set[int],
    window: tuple[int, int],
    collectives: dict[int, intervals.Spans] | None = None,
) -> tuple[dict[int, intervals.Spans], list[tuple[int, int, int]]]:
    """Return who works when between the two moments: main throughout, but for silent stretches that other threads fill.

    And the handoffs: (thread that goes on at the moment, thread that it took over from, moment in ns).

    A thread that took over may wait for others in turn. What `workers` do besides stands by itself, in bursts. `collectives`: those that
    host threads run (gloo); a stretch in which one goes on and ends was a wait for it.
    """
    running = collectives or {}
    covered = {main: np.array([window], dtype=np.int64)}
    handoffs: list[tuple[int, int, int]] = []
    free, queue = set(workers) - {main}, [main]
    while queue:
        thread = queue.pop(0)
        if thread not in shown:
            continue
        stretches, holes = shown[thread].find_silences(covered[thread]), []
        for other in sorted(free & shown.keys()):
            bursts = _find_bursts(shown[other], stretches)
            if not len(bursts):
                continue
            covered[other] = intervals.merge_spans(bursts)
            holes.append(bursts)
            handoffs += [(other, thread, first) for first, _ in bursts.tolist()] + [(thread, other, last) for _, last in bursts.tolist()]
        for other, spans in running.items():
            waited = _find_waited_for(spans, stretches) if other != thread else intervals.NO_SPANS
            holes += [waited] if len(waited) else []
            handoffs += [(thread, other, last) for last in waited[:, 1].tolist()]
        if holes:
            covered[thread] = intervals.subtract_spans(covered[thread], intervals.merge_spans(np.vstack(holes)))
        taken = {other for other in free if other in covered}
        queue += sorted(taken)
        free -= taken
    for other in sorted(set(workers) - {main}):
        spans = np.clip(running.get(other, intervals.NO_SPANS), *window)
        spans = spans[spans[:, 1] > spans[:, 0]]
        handoffs += [(other, main, first) for first in spans[:, 0].tolist() if first > window[0]]
        known = intervals.merge_spans(np.vstack((covered.get(other, intervals.NO_SPANS), spans)))
        covered[other] = _add_bursts(shown.get(other), known, window)
    return covered, handoffs


def _find_bursts(events: ThreadActivity, stretches: intervals.Spans) -> intervals.Spans:
    """Return the time in which a thread that shows nothing before a stretch fills it, for each stretch where it does.

    The thread may go on for a moment when the one that waited for it has been woken: its time within the stretch counts.
    """
    first, last = stretches[:, 0], stretches[:, 1]
    low, high = np.searchsorted(events.edges, first, "right"), np.searchsorted(events.edges, last, "left")
    some = np.flatnonzero(high - low >= 2)
    begin, end = events.edges[low[some]], events.edges[high[some] - 1]
    end = np.where(events.depth(last[some]) > 0, last[some], end)
    fills = (end - begin) >= FILLED_SHARE * (last - first)[some]
    return np.stack((begin, end), axis=1)[fills & (events.depth(first[some]) <= 0)]


def _find_waited_for(spans: intervals.Spans, stretches: intervals.Spans) -> intervals.Spans:
    """Return the part of each stretch in which one of `spans` goes on that had begun before and ends within, most of it at least."""
    found = [intervals.NO_SPANS]
    for first, last in stretches.tolist():
        ends = spans[(spans[:, 0] <= first) & (spans[:, 1] > first) & (spans[:, 1] <= last), 1]
        if len(ends) and ends.max() - first >= FILLED_SHARE * (last - first):
            found.append(np.array([[first, ends.max()]], dtype=np.int64))
    return np.concatenate(found)


def _add_bursts(events: ThreadActivity | None, covered: intervals.Spans, window: tuple[int, int]) -> intervals.Spans:
    if events is None:
        return covered
    edges = events.inside(window[0] - 1, window[1] + 1)
    if len(covered):
        place = np.searchsorted(covered.reshape(-1), edges, "right")
        edges = edges[(place % 2 == 0) & ~np.isin(edges, covered)]
    if not len(edges):
        return covered
    far = np.diff(edges) > BURST_GAP_NS
    starts, ends = edges[np.concatenate(([True], far))], edges[np.concatenate((far, [True]))]
    bursts = np.stack((starts, np.maximum(ends, starts + 1)), axis=1)
    return (
        intervals.merge_spans(np.vstack((covered, intervals.subtract_spans(bursts, covered))))
        if len(covered)
        else intervals.merge_spans(bursts)
    )


NODE_CAUSES = ("profiler", "gc", "compile", "init", "data", "io", "allocation", "unexplained")
"""Causes of host time besides calls; where they overlap the first one holds (the order of timeline.host_events)."""


Causes = dict[tuple[int | None, str], intervals.Spans]
"""Time by (thread, cause); thread None: of every thread."""

TRAINING = ("forward", "backward", "optimizer")
"""Phases whose ops are the work of a step, wherever they run."""

FREE_CALL = r"^(cuda|hip)(Free$|FreeHost)|^cuMemFree"

DEVICE_SYNC = r"(?i)^(cuda|hip)DeviceSynchronize$|^(cu|hip)CtxSynchronize$"

QUEUE_CALL_TIMES, QUEUE_CALL_NS = 10, 50_000
"""A launch call waits for a place in the queue where it takes more than 10 times the usual and 50 us with hundreds of kernels pending."""

FULL_CALL_TIMES = 1.5
"""A call that takes this many times the usual at a full queue waits for a place."""


class Nodes(NamedTuple):
    """Nodes as columns, as in model.graph.Graph."""

    kind: Ints
    lane: Ints
    start: Ints
    end: Ints
    kernel: Ints
    launch: Ints
    op: Ints


class Calls(NamedTuple):
    """The calls of a step that are nodes, in order of thread and start; `hole`: the wait within the call, from its own time on."""

    thread: Ints
    start: Ints
    end: Ints
    hole_start: Ints
    kind: Ints
    launch: Ints
    op: Ints
    kernel: Ints
    """The work that the call waited for (sync, or a full queue); -1: none."""


def find_calls(
    trace: Trace, work: DeviceWork, syncs: pl.DataFrame, normal: NormalLatencies, queued: IssuedLaunches, queue_limit: int
) -> Calls:
    """Return all launch, sync and allocation calls of `trace`. A call that launches and then waits gives one of each."""
    launches = trace.launches
    start, end = launches["start_ns"].to_numpy(), launches["end_ns"].to_numpy()
    # The waits for the whole device that `syncs` leaves out (the profiler's own): they end the recording, and so the last step
    found = launches.filter(match_column("api", DEVICE_SYNC) & ~pl.col("id").is_in(syncs["launch"].implode()))
    by_end = np.argsort(work.end, kind="stable")  # such a call waited for the last work to end before it returned, but for clock noise
    last = np.append(by_end, -1)[np.searchsorted(work.end[by_end], found["end_ns"].to_numpy() + CLOCK_NS, "right") - 1]
    kernel = null_missing(last, "kernel")
    ending = found.select(pl.col("id").alias("launch"), "start_ns", "end_ns").with_columns(kernel)
    known = pl.concat([syncs.drop_nulls("launch").select("launch", "start_ns", "end_ns", "kernel"), ending])
    blocking = known["launch"].to_numpy()
    done = _find_launch_ends(work, start, end, normal, blocking)
    waiting = _find_sync_calls(work, known, normal, done)
    # The calls that start work, up to the moment `done`; where the queue was full only their usual time before that
    rows, begin, stop = queued.row, queued.start, done[queued.row]
    lasted = stop - begin
    long = (count_pending(work, begin) >= QUEUE_PENDING) & (lasted > max(QUEUE_CALL_TIMES * normal.call, QUEUE_CALL_NS))
    long |= queued.are_near(queue_limit) & (lasted > FULL_CALL_TIMES * normal.call)
    full = long & ~np.isin(rows, blocking)
    by_end = np.argsort(work.end, kind="stable")
    freed = np.append(by_end, -1)[np.searchsorted(work.end[by_end], stop, "right") - 1]
    over = np.append(work.end, NEVER)[freed]  # the call goes on no earlier than the work that made room is over
    own = np.where(full, np.maximum(np.maximum(stop - normal.call, begin), over), begin)
    nothing = np.zeros(len(rows), dtype=np.int64)
    launched = Calls(nothing, own, stop, begin, nothing + encode_node_kind("launch"), rows, nothing, np.where(full, freed, -1))
    allocating = _find_allocations(launches, work, np.concatenate((launched.launch, waiting.launch)))
    calls = Calls(*(np.concatenate(parts) for parts in zip(launched, waiting, allocating, strict=True)))
    thread, op = launches["thread"].fill_null(-1).to_numpy(), launches["op"].fill_null(-1).to_numpy()
    calls = calls._replace(thread=thread[calls.launch], op=op[calls.launch])
    calls = Calls(*(column[np.lexsort((calls.end, calls.start, calls.thread))] for column in calls))
    # Cut so that each begins when those before it in its thread are over
    same = calls.thread[1:] == calls.thread[:-1]
    before = np.append(NEVER, np.where(same, accumulate_maximum(calls.end, same)[:-1], NEVER))[: len(calls.end)]
    hole, first = np.maximum(calls.hole_start, before), np.maximum(calls.start, before)
    return calls._replace(hole_start=hole, start=first, end=np.maximum(calls.end, first))


def _find_launch_ends(work: DeviceWork, start: Ints, end: Ints, normal: NormalLatencies, blocking: Ints) -> Ints:
    """Return when each launch call has done its part: at its end, or where its work begins before that.

    Of the calls `blocking` that waited in the stream behind other work only the usual time counts, up to there they staged data.
    """
    first, before = np.full(len(start), np.iinfo(np.int64).max), np.full(len(start), NEVER)
    linked = np.flatnonzero(work.launch >= 0)
    np.minimum.at(first, work.launch[linked], work.start[linked])
    np.maximum.at(before, work.launch[linked], np.minimum(work.reached[linked], work.start[linked]))
    done: Ints = np.clip(first, start, end)
    queued = blocking[before[blocking] > start[blocking]]
    done[queued] = np.minimum(done[queued], start[queued] + normal.call)
    return done


def _find_sync_calls(work: DeviceWork, known: pl.DataFrame, normal: NormalLatencies, done: Ints) -> Calls:
    """Return the calls that wait: their own time at the end, the wait before it as a hole; without work to wait for all is their own.

    A call that launches what it waits for begins to wait when that is `done`. One that returns before its own copy is over waited for the
    work before the copy in its stream: from pageable memory a call returns when the data is staged (CUDA Runtime API, "API synchronization
    behavior"), while the stream's turn must have come.
    """
    start, end = known["start_ns"].to_numpy(), known["end_ns"].to_numpy()
    rows, kernel = known["launch"].to_numpy(), known["kernel"].fill_null(-1).to_numpy()
    early = (kernel >= 0) & (np.append(work.end, NEVER)[kernel] > end) & (np.append(work.launch, -1)[kernel] == rows)
    kernel = np.where(early, np.append(work.previous, -1)[kernel], kernel)
    over = np.append(work.end, NEVER)[kernel]
    waited = (over > start) & (over <= end + CLOCK_NS)
    launching = np.isin(rows, work.launch)
    begin = np.where(launching, np.clip(done[rows], start, end), start)
    own = np.where(waited, np.maximum(end - normal.sync_call, np.maximum(np.minimum(over, end), begin)), begin)
    own = np.where(waited & early, np.maximum(np.minimum(over, end), begin), own)  # staging is the call's own time
    nothing = np.zeros(len(rows), dtype=np.int64)
    return Calls(nothing, own, end, begin, nothing + encode_node_kind("sync"), rows, nothing, np.where(waited, kernel, -1))


def _find_allocations(launches: pl.DataFrame, work: DeviceWork, taken: Ints) -> Calls:
    """Return the calls that take or give back memory. A free waits for all work issued before it (CUDA C++ Programming Guide).

    One that returned while such work ran on (cudaFree of nothing) did not wait. No cudaMalloc of the recordings at hand did.
    """
    found = launches.filter(match_column("api", ALLOCATION_CALL) & ~pl.col("id").is_in(pl.Series(taken).implode()))
    start, end, rows = found["start_ns"].to_numpy(), found["end_ns"].to_numpy(), found["id"].to_numpy()
    frees = found.select(match_column("api", FREE_CALL)).to_series().to_numpy()
    # The work that ends last among what had been issued before each call
    order = np.argsort(work.call_start, kind="stable")
    holder = np.where(np.maximum.accumulate(work.end[order]) == work.end[order], np.arange(len(order)), 0)
    issued = np.searchsorted(work.call_start[order], start)
    last = np.append(order[np.maximum.accumulate(holder)], -1)[issued - 1]
    over = np.append(work.end, NEVER)[last]
    waits = frees & (over > start) & (over <= end + CLOCK_NS)
    nothing = np.zeros(len(rows), dtype=np.int64)
    own = np.where(waits, np.minimum(over, end), start)
    return Calls(nothing, own, end, start, nothing + encode_node_kind("allocation"), rows, nothing, np.where(waits, last, -1))


class OpPieces(NamedTuple):
    """Time in which an op was the innermost one of its thread, in order of thread and start."""

    thread: Ints
    start: Ints
    end: Ints
    op: Ints
    kernel: Ints
    """CPU-only runs: the row of kernels that the op is; -1: none."""
    kind: Ints
    """Code of the kind of node: communication for the collectives of a CPU-only run, else host."""
    trains: Ints
    """1: the op is of forward, backward or optimizer; 0: it is not."""


def find_collectives(trace: Trace) -> dict[int, intervals.Spans]:
    """Return when each host thread of a CPU-only run was in a collective."""
    rows = trace.kernels.filter(pl.col("collective").fill_null(False))["op"].drop_nulls()
    ops = trace.ops.filter(pl.col("id").is_in(rows.implode()) & pl.col("thread").is_not_null())
    return {int(thread): found.select("start_ns", "end_ns").sort("start_ns").to_numpy() for (thread,), found in ops.group_by("thread")}


def find_op_pieces(trace: Trace, window: tuple[int, int], *, on_cpu: bool) -> OpPieces:
    """Return the pieces of the ops that were open between the two moments."""
    inside = pl.col("thread").is_not_null() & (pl.col("start_ns") < window[1]) & (pl.col("end_ns") > window[0])
    ops = trace.ops.select("id", "thread", "start_ns", "end_ns").filter(inside)
    nesting = nest(ops)
    rows, spans = find_self_spans(nesting)
    op = ops["id"].to_numpy()[rows]
    kernel, kind = np.full(trace.ops.height, -1, dtype=np.int64), np.full(trace.ops.height, encode_node_kind("host"))
    if on_cpu and trace.kernels.height:
        linked = trace.kernels.filter(pl.col("op").is_not_null())
        kernel[linked["op"].to_numpy()] = linked["id"].to_numpy()
        kind[linked.filter(pl.col("collective").fill_null(False))["op"].to_numpy()] = encode_node_kind("communication")
    trains = trace.ops["phase"].cast(pl.String).is_in(TRAINING).fill_null(False).to_numpy().astype(np.int64)
    return OpPieces(nesting.thread[rows], spans[:, 0], spans[:, 1], op, kernel[op], kind[op], trains[op])


def build_chain(thread: int, covered: intervals.Spans, calls: Calls, pieces: OpPieces, causes: Causes) -> Nodes:
    """Return the nodes of one thread in order: its calls, and the rest of `covered` by cause and, on a CPU, by op.

    A launch call is cut by cause too: code that is loaded within it is no cost of launching. Ops of the training are the work of the step
    also within a generator that makes the batches.
    """
    mine = _clip_calls(Calls(*(column[calls.thread == thread] for column in calls)), covered)
    own = OpPieces(*(column[slice(*np.searchsorted(pieces.thread, [thread, thread + 1]))] for column in pieces))
    working = OpPieces(*(column[own.kernel >= 0] for column in own))
    held = ([causes.get((holder, cause), intervals.NO_SPANS) for holder in (thread, None)] for cause in NODE_CAUSES)
    spans = [intervals.merge_spans(np.vstack(both)) for both in held]
    # The pieces of the training that lie within the time of a loader
    data = spans[NODE_CAUSES.index("data")].reshape(-1)
    loading = (np.searchsorted(data, own.start, "right") % 2 == 1) | (np.searchsorted(data, own.end, "left") % 2 == 1)
    generated = OpPieces(*(column[(own.trains == 1) & loading] for column in own))
    # The nodes: what lies between two borders and within `covered`, but not within the wait of a call
    moments = (generated.start, generated.end, mine.start, mine.end, mine.hole_start, working.start, working.end)
    edges = sort_distinct(np.concatenate([covered.ravel(), *moments, *(span.ravel() for span in spans)]))
    start, end = edges[:-1], edges[1:]
    call, hole = _find_span(mine.start, mine.end, start), _find_span(mine.hole_start, mine.start, start)
    kept = intervals.find_inside(covered, start) & (hole < 0)
    start, end, call = start[kept], end[kept], call[kept]
    kind = np.full(len(start), encode_node_kind("host"), dtype=np.int64)
    for cause, span in reversed(list(zip(NODE_CAUSES, spans, strict=True))):
        kind[intervals.find_inside(span, start)] = encode_node_kind(cause)
    kind[(kind == encode_node_kind("data")) & (_find_span(generated.start, generated.end, start) >= 0)] = encode_node_kind("host")
    op = _find_longest_op(start, end, own)
    piece = _find_span(working.start, working.end, start)
    kernel = np.where((piece >= 0) & (call < 0), np.append(working.kernel, -1)[piece], -1)
    kind = np.where((kernel >= 0) & (kind == encode_node_kind("host")), np.append(working.kind, -1)[piece], kind)
    called = np.append(mine.kind, -1)[call]
    caused = (called == encode_node_kind("launch")) & (kind != encode_node_kind("host"))  # code that the driver loads within a launch call
    kind = np.where((call >= 0) & ~caused, called, kind)
    op = np.where(call >= 0, np.append(mine.op, -1)[call], op)
    launch = np.where(caused, -1, np.append(mine.launch, -1)[call])
    nodes = Nodes(kind, np.full(len(start), thread), start, end, kernel, launch, op)
    # Calls that take no time, because their work began at once or another cause holds all that they took up to their end, are a moment
    hidden = call[caused & (end == np.append(mine.end, -1)[call])]
    rows = np.union1d(np.flatnonzero(mine.end == mine.start), hidden)
    if not len(rows):
        return nodes
    at, nothing = mine.end[rows], np.full(len(rows), -1)
    points = Nodes(mine.kind[rows], np.full(len(rows), thread), at, at, nothing, mine.launch[rows], mine.op[rows])
    both = Nodes(*(np.concatenate(pair) for pair in zip(nodes, points, strict=True)))
    order = np.lexsort((both.end, both.start))
    return Nodes(*(column[order] for column in both))


def _clip_calls(calls: Calls, covered: intervals.Spans) -> Calls:
    """Return the calls that begin within `covered`, none longer than it."""
    if not len(covered):
        return Calls(*(column[:0] for column in calls))
    place = np.searchsorted(covered[:, 0], calls.hole_start, "right") - 1
    last = np.where(place >= 0, covered[np.maximum(place, 0), 1], NEVER)
    inside = calls.hole_start < last
    cut = Calls(*(column[inside] for column in calls))
    return cut._replace(start=np.minimum(cut.start, last[inside]), end=np.minimum(cut.end, last[inside]))


def _find_span(starts: Ints, ends: Ints, t: Ints) -> Ints:
    """Return which of the spans (in order, not overlapping; some without length) holds each moment; -1: none."""
    rows = np.flatnonzero(ends > starts)
    if not len(rows):
        return np.full(len(t), -1, dtype=np.int64)
    place = np.searchsorted(starts[rows], t, "right") - 1
    found: Ints = np.where((place >= 0) & (t < ends[rows][np.maximum(place, 0)]), rows[np.maximum(place, 0)], -1)
    return found


def _find_longest_op(start: Ints, end: Ints, pieces: OpPieces) -> Ints:
    """Return for each span (in order, apart) the op that was the innermost one for most of it; -1: no op was, or none for longer."""
    found = np.full(len(start), -1, dtype=np.int64)
    edges = sort_distinct(np.concatenate((start, end, pieces.start, pieces.end)))
    if len(edges) < 2 or not len(start):
        return found
    left, length = edges[:-1], np.diff(edges)
    span, piece = _find_span(start, end, left), _find_span(pieces.start, pieces.end, left)
    held = (span >= 0) & (piece >= 0)
    width = int(pieces.op.max(initial=0)) + 1
    key, place = np.unique(span[held] * width + pieces.op[piece[held]], return_inverse=True)
    order = np.lexsort((-key, np.bincount(place, length[held])))  # by time: of several writes to one place the last stays
    found[key[order] // width] = key[order] % width
    return found
