"""The host threads of a step as chains of nodes: the calls that start work, wait or allocate, and the time between them by its cause."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.names import matches
from gpudiag.attribution.nesting import nest, nulled, self_spans
from gpudiag.model.graph import Ints, node_kind
from gpudiag.model.trace import Trace
from gpudiag.timeline.graph_queue import Issued
from gpudiag.timeline.graph_work import NEVER, QUEUE_PENDING, Normal, Work, pending
from gpudiag.trace.kernel_names import ALLOCATION_CALL

CAUSES = ("profiler", "gc", "compile", "data", "io", "allocation")
"""Causes of host time besides calls; where they overlap the first one holds (the order of timeline.host_events)."""

Bools = npt.NDArray[np.bool_]

Causes = dict[tuple[int | None, str], intervals.Spans]
"""Time by (thread, cause); thread None: of every thread."""

TRAINING = ("forward", "backward", "optimizer")
"""Phases whose ops are the work of a step, wherever they run."""

CLOCK_NS = 2_000
"""The end of the work that a call waited for may lie this far behind the call's end: the clocks of device and host differ by so much."""

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


def calls_of(trace: Trace, work: Work, syncs: pl.DataFrame, normal: Normal, queued: Issued, queue_limit: int) -> Calls:
    """Return all launch, sync and allocation calls of `trace`. A call that launches and then waits gives one of each."""
    launches = trace.launches
    start, end = launches["start_ns"].to_numpy(), launches["end_ns"].to_numpy()
    known = pl.concat([syncs.drop_nulls("launch").select("launch", "start_ns", "end_ns", "kernel"), _last_syncs(trace, work, syncs)])
    blocking = known["launch"].to_numpy()
    done = _launch_ends(work, start, end, normal, blocking)
    waiting = _sync_calls(work, known, normal, done)
    launched = _cut_launches(work, queued, done, normal, queued.near(queue_limit), blocking)
    allocating = _allocations(launches, work, np.concatenate((launched.launch, waiting.launch)))
    columns = [np.concatenate(parts) for parts in zip(launched, waiting, allocating, strict=True)]
    thread, op = launches["thread"].fill_null(-1).to_numpy(), launches["op"].fill_null(-1).to_numpy()
    every = Calls(*columns)
    every = every._replace(thread=thread[every.launch], op=op[every.launch])
    return _in_turn(Calls(*(column[np.lexsort((every.end, every.start, every.thread))] for column in every)))


def _launch_ends(work: Work, start: Ints, end: Ints, normal: Normal, blocking: Ints) -> Ints:
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


def _cut_launches(work: Work, queued: Issued, done: Ints, normal: Normal, at_limit: Bools, blocking: Ints) -> Calls:
    """Return the calls that start work, up to the moment `done`; where the queue was full only their usual time before that."""
    rows, begin, stop = queued.row, queued.start, done[queued.row]
    lasted = stop - begin
    long = (pending(work, begin) >= QUEUE_PENDING) & (lasted > max(QUEUE_CALL_TIMES * normal.call, QUEUE_CALL_NS))
    long |= at_limit & (lasted > FULL_CALL_TIMES * normal.call)
    full = long & ~np.isin(rows, blocking)
    by_end = np.argsort(work.end, kind="stable")
    freed = np.append(by_end, -1)[np.searchsorted(work.end[by_end], stop, "right") - 1]
    own = np.where(full, np.maximum(stop - normal.call, begin), begin)
    nothing = np.zeros(len(rows), dtype=np.int64)
    return Calls(nothing, own, stop, begin, nothing + node_kind("launch"), rows, nothing, np.where(full, freed, -1))


def _sync_calls(work: Work, known: pl.DataFrame, normal: Normal, done: Ints) -> Calls:
    """Return the calls that wait: their own time at the end, the wait before it as a hole; without work to wait for all is their own.

    A call that launches what it waits for begins to wait when that is `done`.
    """
    start, end = known["start_ns"].to_numpy(), known["end_ns"].to_numpy()
    rows, kernel = known["launch"].to_numpy(), known["kernel"].fill_null(-1).to_numpy()
    over = np.append(work.end, NEVER)[kernel]
    waited = (over > start) & (over <= end + CLOCK_NS)
    launching = np.isin(rows, work.launch)
    begin = np.where(launching, np.clip(done[rows], start, end), start)
    own = np.where(waited, np.maximum(end - normal.sync_call, np.maximum(np.minimum(over, end), begin)), begin)
    nothing = np.zeros(len(rows), dtype=np.int64)
    return Calls(nothing, own, end, begin, nothing + node_kind("sync"), rows, nothing, np.where(waited, kernel, -1))


def _last_syncs(trace: Trace, work: Work, syncs: pl.DataFrame) -> pl.DataFrame:
    """Return the waits for the whole device that `syncs` leaves out (the profiler's own): they end the recording, and so the last step."""
    found = trace.launches.filter(matches("api", DEVICE_SYNC) & ~pl.col("id").is_in(syncs["launch"].implode()))
    kernel = nulled(_last_over(work, found["end_ns"].to_numpy()), "kernel")
    return found.select(pl.col("id").alias("launch"), "start_ns", "end_ns").with_columns(kernel)


def _allocations(launches: pl.DataFrame, work: Work, taken: Ints) -> Calls:
    """Return the calls that take or give back memory. A free waits for the device (CUDA C++ Programming Guide)."""
    found = launches.filter(matches("api", ALLOCATION_CALL) & ~pl.col("id").is_in(pl.Series(taken).implode()))
    start, end, rows = found["start_ns"].to_numpy(), found["end_ns"].to_numpy(), found["id"].to_numpy()
    frees = found.select(matches("api", FREE_CALL)).to_series().to_numpy()
    last = _last_over(work, end)
    over = np.append(work.end, NEVER)[last]
    waits = frees & (over > start) & (np.append(work.call_start, NEVER)[last] < start)
    nothing = np.zeros(len(rows), dtype=np.int64)
    own = np.where(waits, np.minimum(over, end), start)
    return Calls(nothing, own, end, start, nothing + node_kind("allocation"), rows, nothing, np.where(waits, last, -1))


def _last_over(work: Work, moments: Ints) -> Ints:
    """Return the row of the work that was the last to end up to each moment (or as far behind as clocks differ); -1: none."""
    by_end = np.argsort(work.end, kind="stable")
    found: Ints = np.append(by_end, -1)[np.searchsorted(work.end[by_end], moments + CLOCK_NS, "right") - 1]
    return found


def _in_turn(calls: Calls) -> Calls:
    """Return `calls` (by thread and start) cut so that each begins when the one before it in its thread is over."""
    if not len(calls.start):
        return calls
    base = int(calls.hole_start.min())
    group = np.concatenate(([0], np.cumsum(calls.thread[1:] != calls.thread[:-1])))
    lift = group * (int(calls.end.max()) - base + 1)
    reached = np.maximum.accumulate(calls.end - base + lift)
    before = np.concatenate(([0], reached[:-1])) - lift + base
    hole, start = np.maximum(calls.hole_start, before), np.maximum(calls.start, before)
    return calls._replace(hole_start=hole, start=start, end=np.maximum(calls.end, start))


def causes_of(idle: pl.DataFrame, events: pl.DataFrame) -> Causes:
    """Return the time of each thread that a cause of CAUSES holds: as `events` show it, and where idle time was explained so."""
    spans = pl.concat([frame.select("thread", "start_ns", "end_ns", "cause") for frame in (events, idle)])
    spans = spans.with_columns(pl.col("cause").str.strip_prefix("idle_")).filter(pl.col("cause").is_in(CAUSES))
    return {(thread, str(cause)): intervals.of(rows) for (thread, cause), rows in spans.group_by("thread", "cause")}


class Pieces(NamedTuple):
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


def collectives_of(trace: Trace) -> dict[int, intervals.Spans]:
    """Return when each host thread of a CPU-only run was in a collective."""
    rows = trace.kernels.filter(pl.col("collective").fill_null(False))["op"].drop_nulls()
    ops = trace.ops.filter(pl.col("id").is_in(rows.implode()) & pl.col("thread").is_not_null())
    return {int(thread): found.select("start_ns", "end_ns").sort("start_ns").to_numpy() for (thread,), found in ops.group_by("thread")}


def op_pieces(trace: Trace, window: tuple[int, int], *, on_cpu: bool) -> Pieces:
    """Return the pieces of the ops that were open between the two moments."""
    ops = trace.ops.filter(pl.col("thread").is_not_null() & (pl.col("start_ns") < window[1]) & (pl.col("end_ns") > window[0]))
    nesting = nest(ops)
    rows, spans = self_spans(nesting)
    op = ops["id"].to_numpy()[rows]
    kernel, kind = np.full(trace.ops.height, -1, dtype=np.int64), np.full(trace.ops.height, node_kind("host"))
    if on_cpu and trace.kernels.height:
        linked = trace.kernels.filter(pl.col("op").is_not_null())
        kernel[linked["op"].to_numpy()] = linked["id"].to_numpy()
        kind[linked.filter(pl.col("collective").fill_null(False))["op"].to_numpy()] = node_kind("communication")
    trains = trace.ops["phase"].cast(pl.String).is_in(TRAINING).fill_null(False).to_numpy().astype(np.int64)
    return Pieces(nesting.thread[rows], spans[:, 0], spans[:, 1], op, kernel[op], kind[op], trains[op])


def chain(
    thread: int,
    covered: intervals.Spans,
    calls: Calls,
    pieces: Pieces,
    causes: Causes,
) -> Nodes:
    """Return the nodes of one thread in order: its calls, and the rest of `covered` by cause and, on a CPU, by op.

    A launch call is cut by cause too: code that is loaded within it is no cost of launching. Ops of the training are the work of the step
    also within a generator that makes the batches.
    """
    mine = Calls(*(column[calls.thread == thread] for column in calls))
    mine = _clipped(mine, covered)
    own = Pieces(*(column[pieces.thread == thread] for column in pieces))
    working = Pieces(*(column[own.kernel >= 0] for column in own))
    spans = [_held(causes, thread, cause) for cause in CAUSES]
    generated = _generated(own, spans[CAUSES.index("data")])
    borders = [
        covered.ravel(),
        generated.start,
        generated.end,
        mine.start,
        mine.end,
        mine.hole_start,
        working.start,
        working.end,
        *(span.ravel() for span in spans),
    ]
    edges = intervals.distinct(np.concatenate(borders))
    start, end = edges[:-1], edges[1:]
    call, hole = _index(mine.start, mine.end, start), _index(mine.hole_start, mine.start, start)
    kept = (np.searchsorted(covered.reshape(-1), start, "right") % 2 == 1) & (hole < 0)
    start, end, call = start[kept], end[kept], call[kept]
    kind = np.full(len(start), node_kind("host"), dtype=np.int64)
    for cause, span in reversed(list(zip(CAUSES, spans, strict=True))):
        kind[np.searchsorted(span.reshape(-1), start, "right") % 2 == 1] = node_kind(cause)
    kind[(kind == node_kind("data")) & (_index(generated.start, generated.end, start) >= 0)] = node_kind("host")
    op = _most(start, end, own)
    piece = _index(working.start, working.end, start)
    kernel = np.where((piece >= 0) & (call < 0), np.append(working.kernel, -1)[piece], -1)
    kind = np.where((kernel >= 0) & (kind == node_kind("host")), np.append(working.kind, -1)[piece], kind)
    called = np.append(mine.kind, -1)[call]
    caused = (called == node_kind("launch")) & (kind != node_kind("host"))  # code that the driver loads within a launch call
    kind = np.where((call >= 0) & ~caused, called, kind)
    op = np.where(call >= 0, np.append(mine.op, -1)[call], op)
    launch = np.where(caused, -1, np.append(mine.launch, -1)[call])
    nodes = Nodes(kind, np.full(len(start), thread), start, end, kernel, launch, op)
    hidden = call[caused & (end == np.append(mine.end, -1)[call])]
    return _with_points(nodes, mine, np.union1d(np.flatnonzero(mine.end == mine.start), hidden), thread)


def _generated(pieces: Pieces, data: intervals.Spans) -> Pieces:
    """Return the pieces of the training that lie within the time of a loader."""
    chosen = pieces.trains == 1
    chosen &= (np.searchsorted(data.reshape(-1), pieces.start, "right") % 2 == 1) | (
        np.searchsorted(data.reshape(-1), pieces.end, "left") % 2 == 1
    )
    return Pieces(*(column[chosen] for column in pieces))


def _held(causes: Causes, thread: int, cause: str) -> intervals.Spans:
    return intervals.union(np.vstack([causes.get((holder, cause), intervals.NONE) for holder in (thread, None)]))


def _clipped(calls: Calls, covered: intervals.Spans) -> Calls:
    """Return the calls that begin within `covered`, none longer than it."""
    if not len(covered):
        return Calls(*(column[:0] for column in calls))
    place = np.searchsorted(covered[:, 0], calls.hole_start, "right") - 1
    last = np.where(place >= 0, covered[np.maximum(place, 0), 1], NEVER)
    inside = calls.hole_start < last
    cut = Calls(*(column[inside] for column in calls))
    return cut._replace(start=np.minimum(cut.start, last[inside]), end=np.minimum(cut.end, last[inside]))


def _index(starts: Ints, ends: Ints, t: Ints) -> Ints:
    """Return which of the spans (in order, not overlapping; some without length) holds each moment; -1: none."""
    rows = np.flatnonzero(ends > starts)
    if not len(rows):
        return np.full(len(t), -1, dtype=np.int64)
    place = np.searchsorted(starts[rows], t, "right") - 1
    found: Ints = np.where((place >= 0) & (t < ends[rows][np.maximum(place, 0)]), rows[np.maximum(place, 0)], -1)
    return found


def _with_points(nodes: Nodes, calls: Calls, rows: Ints, thread: int) -> Nodes:
    """Return `nodes` with a moment for each of `rows` of the calls, at its end and before what begins then.

    They take no time because their work began at once, or because another cause holds all that they took up to their end.
    """
    if not len(rows):
        return nodes
    points = Nodes(
        calls.kind[rows], np.full(len(rows), thread), calls.end[rows], calls.end[rows], np.full(len(rows), -1), calls.launch[rows],
        calls.op[rows],
    )  # fmt: skip
    both = Nodes(*(np.concatenate(pair) for pair in zip(nodes, points, strict=True)))
    order = np.lexsort((both.end, both.start))
    return Nodes(*(column[order] for column in both))


def _most(start: Ints, end: Ints, pieces: Pieces) -> Ints:
    """Return for each span (in order, apart) the op that was the innermost one for most of it; -1: no op was, or none for longer."""
    found = np.full(len(start), -1, dtype=np.int64)
    edges = intervals.distinct(np.concatenate((start, end, pieces.start, pieces.end)))
    if len(edges) < 2 or not len(start):
        return found
    left, length = edges[:-1], np.diff(edges)
    span, piece = _index(start, end, left), _index(pieces.start, pieces.end, left)
    held = (span >= 0) & (piece >= 0)
    frame = pl.DataFrame({"span": span[held], "op": pieces.op[piece[held]], "length": length[held]})
    best = frame.group_by("span", "op").agg(pl.col("length").sum()).sort("span", "length", "op", descending=[False, True, False])
    best = best.unique("span", keep="first", maintain_order=True)
    found[best["span"].to_numpy()] = best["op"].to_numpy()
    return found
