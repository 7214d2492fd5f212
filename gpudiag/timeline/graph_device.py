"""The streams of a step as chains of nodes, and what each piece of work had to wait for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.arrays import Bools, Ints
from gpudiag.attribution.names import match_column
from gpudiag.model.graph import encode_edge_kind
from gpudiag.timeline.graph_host import Nodes
from gpudiag.timeline.graph_latencies import NEVER, DeviceWork, NormalLatencies, accumulate_maximum, estimate_usual
from gpudiag.timeline.host_threads import STREAM_WAIT_CALL

MAX_STREAMS = 64
"""Streams whose work is looked up for an event: more are not used by a training run, only by a hostile file."""

CLOSE_NS = 5_000
"""Work that begins this soon after work of another stream ended, for no other reason, waited for it: an event, or room on the device."""

NEAR_NS = 25_000
"""The same where that work ran for all the time in which nothing else held the other one up (MI300X: 19 us from a collective's end)."""


class DeviceNodes(NamedTuple):
    """The device nodes of a step; positions are into `rows`."""

    rows: Ints
    """Rows of kernels, by stream and start."""
    carried: Bools
    """Issued before the step."""
    start: Ints
    end: Ints
    """Cut where the next one of the stream overlaps it."""
    nodes: Nodes
    first: int
    """Number of the first of them among the nodes of the graph."""


class Edges(NamedTuple):
    """Edges as columns; src and dst number the nodes of the graph."""

    src: Ints
    dst: Ints
    kind: Ints
    lag: Ints


def build_edges(src: Ints, dst: Ints, kind: str, lag: Ints | int) -> Edges:
    """Return edges of one kind."""
    return Edges(src, dst, np.full(len(src), encode_edge_kind(kind)), np.broadcast_to(np.asarray(lag, dtype=np.int64), (len(src),)))


def join_edges(parts: list[Edges]) -> Edges:
    """Return all edges together."""
    return Edges(*(np.concatenate(columns).astype(np.int64) for columns in zip(*parts, strict=True)))


def find_device_nodes(work: DeviceWork, window: tuple[int, int], streams: dict[int, int], first_node: int) -> DeviceNodes:
    """Return the work that was issued in the step, and before it what earlier steps had left to do; `streams`: their places among lanes.

    Work without a launch record belongs to the step where it follows work of the step on its stream; on a stream of which no launch was
    recorded, where it started in the step. Work starts when its call began at the earliest, whatever the clocks say.
    """
    linked = work.launch >= 0
    own = linked & (work.call_start >= window[0]) & (work.call_start < window[1])
    old = linked & (work.call_start < window[0]) & (work.end > window[0])
    later = linked & (work.call_start >= window[1])
    # From when (first) to when (after) work without a launch record belongs to the step, by stream
    numbers, place = np.unique(work.stream, return_inverse=True)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    after, last = first.copy(), np.full(len(numbers), window[0])
    np.minimum.at(first, place[own], work.start[own])
    np.minimum.at(after, place[later], work.start[later])
    np.maximum.at(last, place[own], work.end[own])
    seen = first < np.iinfo(np.int64).max
    first = np.where(seen, first, window[0])[place]
    after = np.minimum(after, np.where(seen, np.maximum(last, window[1]), window[1]))[place]
    own |= ~linked & (work.start >= first) & (work.start < after)
    old |= ~linked & (work.start < first) & (work.end > window[0])
    rows = work.order[(own | old)[work.order]]
    stream = work.stream[rows]
    start = np.maximum(work.start[rows], np.where(old[rows], window[0], np.maximum(work.call_start[rows], NEVER)))
    end = np.maximum(work.end[rows], start)
    # Cut where the next one of the stream begins earlier and ends no earlier (programmatic dependent launch): the two then follow each
    # other as they did. Work that ends within the one before it runs beside it (branches of a graph): no cut
    staggered = (stream[1:] == stream[:-1]) & (start[1:] < end[:-1]) & (end[1:] >= end[:-1])
    end = np.where(np.append(staggered, False), np.append(start[1:], 0), end)
    lane = np.array([-1 - streams[number] for number in stream.tolist()], dtype=np.int64)
    nothing = np.full(len(rows), -1, dtype=np.int64)
    nodes = Nodes(work.kind[rows].astype(np.int64), lane, start, end, rows, nothing, work.op[rows])
    return DeviceNodes(rows, old[rows], start, end, nodes, first_node)


def build_stream_edges(device: DeviceNodes, work: DeviceWork, normal: NormalLatencies) -> Edges:
    """Return the order of the streams: each piece waits for the one before it, and for the last one to end of those before that.

    Work that begins within the one before it waits for the last one that was over by then.
    """
    stream, number = work.stream[device.rows], np.arange(len(device.rows))
    if not len(number):
        return build_edges(number, number, "stream", 0)
    following = stream[1:] == stream[:-1]
    same = np.append(False, following)
    before = np.where(same, number - 1, -1)
    # The one before each in its stream that ends last
    holder = np.maximum.accumulate(np.where(accumulate_maximum(device.end, following) == device.end, number, 0))
    longest = np.where(same, np.append(-1, holder[:-1]), -1)
    # The last one of its stream that was over when it began
    base = int(device.start.min())
    lift = np.unique(stream, return_inverse=True)[1] * (int(device.end.max()) - base + 2) - base
    order = np.argsort(device.end + lift, kind="stable")
    found = order[np.searchsorted((device.end + lift)[order], device.start + lift, "right") - 1]
    fits = (stream[found] == stream) & (device.end[found] <= device.start) & (found != number) & (device.start[found] <= device.start)
    over = np.append(device.end, NEVER)
    nested = (before >= 0) & (over[before] > device.start)
    main = np.where(nested, np.where(fits, found, -1), before)
    extra = (longest >= 0) & (longest != main) & (over[longest] <= device.start)
    src, dst = np.concatenate((main[main >= 0], longest[extra])), np.concatenate((number[main >= 0], number[extra]))
    launch, around = work.launch[device.rows], work.around[device.rows]
    together = (launch[src] >= 0) & (launch[src] == launch[dst])
    kind = np.where(together, 2, np.maximum(around[src] % 2, around[dst] % 2))
    touching = work.end[device.rows][src] > device.start[dst]  # cut: they overlapped
    return build_edges(src + device.first, dst + device.first, "stream", np.where(touching, 0, normal.spacing[kind]))


def build_event_edges(device: DeviceNodes, work: DeviceWork, launches: pl.DataFrame, ready: Ints) -> Edges:
    """Return the waits for other streams. `ready`: when launch and stream let each piece begin.

    A recording names neither the stream that waits nor the event: cudaStreamWaitEvent is taken to hold back the thread's next launch until
    the last work of each other stream that was issued before the call is over, where that fits the times; else the event was recorded
    earlier, and the work that ended right before is what it stood for. A start that launch and stream do not explain, right after the end
    of work of another stream, waited for that.
    """
    src, dst = _find_recorded_waits(device, work, launches)
    over = np.append(device.end, NEVER)
    late = over[src] > ready[dst]
    latency = min(estimate_usual((device.start[dst] - over[src])[late]), CLOSE_NS) if late.any() else 0
    known = ready.copy()
    np.maximum.at(known, dst, over[src] + latency)
    found = _find_ended_just_before(device, work, known + CLOSE_NS)
    inferred = np.flatnonzero(found >= 0)
    pairs = np.unique(np.stack((np.concatenate((src, found[inferred])), np.concatenate((dst, inferred))), axis=1), axis=0)
    return build_edges(pairs[:, 0] + device.first, pairs[:, 1] + device.first, "event", latency)


def _find_recorded_waits(device: DeviceNodes, work: DeviceWork, launches: pl.DataFrame) -> tuple[Ints, Ints]:
    """Return (work that was waited for, work that waited) as positions, from the calls that make a stream wait."""
    calls = launches.filter(match_column("api", STREAM_WAIT_CALL)).drop_nulls("thread")
    none = np.empty(0, dtype=np.int64)
    linked = np.flatnonzero(work.launch[device.rows] >= 0)
    if not calls.height or not len(linked):
        return none, none
    called, thread = work.call_start[device.rows], work.thread[device.rows]
    asked, asking = calls["start_ns"].to_numpy(), calls["thread"].to_numpy()
    # The position of the first work that a thread launched after each moment; -1: none
    waiter = np.full(len(asked), -1, dtype=np.int64)
    for one in np.unique(asking).tolist():
        mine = linked[thread[linked] == one]
        mine = mine[np.argsort(called[mine], kind="stable")]
        chosen = asking == one
        waiter[chosen] = np.append(mine, -1)[np.minimum(np.searchsorted(called[mine], asked[chosen], "right"), len(mine))]
    asked, waiter = asked[waiter >= 0], waiter[waiter >= 0]
    stream = work.stream[device.rows]
    src, dst = [none], [none]
    for other in np.unique(stream)[:MAX_STREAMS].tolist():
        issued = linked[stream[linked] == other]
        issued = issued[np.argsort(called[issued], kind="stable")]
        last = np.append(issued, -1)[np.searchsorted(called[issued], asked, "left") - 1]
        late = (last >= 0) & (np.append(device.end, 0)[last] > device.start[waiter])
        # Which of `rows` was the last to end up to each moment, at most NEAR_NS before it; -1: none
        rows = np.flatnonzero(stream == other)
        moments = device.start[waiter]
        by_end = rows[np.argsort(device.end[rows], kind="stable")]
        found = np.append(by_end, -1)[np.searchsorted(device.end[by_end], moments, "right") - 1]
        last = np.where(late, np.where((found >= 0) & (moments - np.append(device.end, NEVER)[found] <= NEAR_NS), found, -1), last)
        fits = (last >= 0) & (stream[waiter] != other) & (np.append(device.end, 0)[last] <= device.start[waiter])
        src.append(last[fits])
        dst.append(waiter[fits])
    return np.concatenate(src), np.concatenate(dst)


def _find_ended_just_before(device: DeviceNodes, work: DeviceWork, ready: Ints) -> Ints:
    """Return for each position that began later than `ready` the work of another stream that had ended right before; -1: none."""
    found = np.full(len(ready), -1, dtype=np.int64)
    late = np.flatnonzero(device.start > ready)
    if not len(late) or len(np.unique(device.nodes.lane)) < 2:
        return found
    order = np.argsort(device.end, kind="stable")
    ends, lane, called = device.end[order], device.nodes.lane, work.call_start[device.rows]
    place = np.searchsorted(ends, device.start[late], "right") - 1
    for back in range(4):  # the last few ends: one of them may be of the same stream
        at = np.maximum(place - back, 0)
        candidate = order[at]
        near = np.where(device.start[candidate] <= ready[late], NEAR_NS, CLOSE_NS)
        fits = (place >= back) & (lane[candidate] != lane[late]) & (ends[at] >= device.start[late] - near)
        fits &= (called[candidate] <= called[late]) | (called[late] == NEVER)
        fits &= (found[late] < 0) & (device.start[candidate] < device.start[late])
        found[late[fits]] = candidate[fits]
    return found
