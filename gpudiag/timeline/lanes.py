"""The lanes of a time line: steps, idle causes, critical path, streams, host threads; each row drawn as at most a few pieces a pixel.

Events that are wide enough stand alone, the others are joined within one bin of two pixels. No pyramid is needed: the rows are sorted and
disjoint, so the bins are found by bisection and their sums by differences of running sums; at most the lengths of the events are read one
by one.

The work of a GPU stands in a lane for each stream, that of a CPU in one for each thread: the ops without those inside them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.arrays import Ints, sort_distinct
from gpudiag.attribution.device import find_cpu_spans
from gpudiag.attribution.nesting import nest
from gpudiag.model.analysis import Analysis
from gpudiag.model.ops import BOUNDS
from gpudiag.model.timeline import IDLE_BUCKETS

Codes = npt.NDArray[np.uint8]

STYLES = (*BOUNDS, *IDLE_BUCKETS, "outside_recording", "step", "step_left_out", "op", "call", "wait", "mark", "frame")
"""What an event is drawn as; a code is the place in this tuple. call: runtime call, wait: one that waits for the device, frame: a function
of Python."""

BIN_PIXELS = 2
"""Events narrower than this are joined: a bar of one pixel beside a gap of one pixel cannot be told from a grey area."""


class Row(NamedTuple):
    """Events that do not overlap, in order: one line of a lane."""

    start_ns: Ints
    end_ns: Ints
    code: Codes
    table: npt.NDArray[np.uint8]
    """Place in tracks.TABLES of the table that holds the event."""
    id: Ints
    """Row of that table."""
    kinds: tuple[int, ...]
    """Codes that occur."""
    sums_ns: Ints
    """Time of each kind before each event, and last that of all: shape (events + 1, kinds)."""
    longest_ns: int


class DrawnPieces(NamedTuple):
    """What is drawn of a row: columns of equal length."""

    start_ns: Ints
    end_ns: Ints
    code: Codes
    """Of an event; of joined events the one that holds most of their time."""
    events: Ints
    """How many it stands for."""
    busy_ns: Ints
    first: Ints
    """Place of the first event in the row."""


def build_row(start_ns: Ints, end_ns: Ints, code: Codes, table: npt.NDArray[np.uint8], ids: Ints) -> Row:
    """Return the row of events that are sorted and do not overlap. Raises ValueError for others."""
    if (start_ns[1:] < end_ns[:-1]).any():
        raise ValueError("the events of a row overlap or are not in order")
    kinds = tuple(np.flatnonzero(np.bincount(code)).tolist())
    sums = np.zeros((len(start_ns) + 1, len(kinds)), dtype=np.int64)
    for place, kind in enumerate(kinds):
        np.cumsum(np.where(code == kind, end_ns - start_ns, 0), out=sums[1:, place])
    return Row(start_ns, end_ns, code, table, ids, kinds, sums, int((end_ns - start_ns).max(initial=0)))


def draw_pieces(of: Row, from_ns: int, to_ns: int, pixels: int) -> DrawnPieces:
    """Return what is drawn of the events that reach into [from_ns, to_ns) on `pixels` pixels, whole events also at the edges.

    The counts sum to the number of these events and busy_ns to their time. Joined events begin within one bin, so no gap of a bin's
    width is drawn over, and every event lies in a piece, so none is lost. Bins lie at multiples of their width, not from the window's
    edge: nothing flickers while the window moves.
    """
    width = max(1, BIN_PIXELS * (to_ns - from_ns) // max(1, pixels))
    first, last = find_within(of, from_ns, to_ns)
    begins = np.empty(0, dtype=np.int64)
    if first < last:  # a piece begins with a wide event, with what follows one, and with the first event of each bin
        starts = of.start_ns[first:last]
        lengths = of.end_ns[first:last] - starts if of.longest_ns >= width else np.empty(0, dtype=np.int64)
        wide = np.flatnonzero(lengths >= width)
        low, high = int(starts[0]) // width, int(starts[-1]) // width
        edges = np.arange(low + 1, high + 1, dtype=np.int64) * width if high - low < last - first else None
        binned = np.searchsorted(starts, edges) if edges is not None else np.flatnonzero(np.diff(starts // width)) + 1
        found = sort_distinct(np.concatenate(([0], wide, wide + 1, binned)).astype(np.int64))
        begins = found[found < last - first] + first
    ends = np.append(begins[1:], last)
    spent = of.sums_ns[ends] - of.sums_ns[begins] if len(begins) else np.zeros((0, max(1, len(of.kinds))), dtype=np.int64)
    count = ends[: len(begins)] - begins
    most = np.array(of.kinds or (0,), dtype=np.uint8)[spent.argmax(axis=1)]
    code = np.where(count == 1, of.code[begins], most)  # an event of no length has a code too
    return DrawnPieces(of.start_ns[begins], of.end_ns[ends[: len(begins)] - 1], code, count, spent.sum(axis=1), begins)


def find_within(of: Row, from_ns: int, to_ns: int) -> tuple[int, int]:
    """Return (first, last + 1) of the events that reach into [from_ns, to_ns)."""
    first = int(np.searchsorted(of.end_ns, from_ns, side="right"))
    return first, max(first, int(np.searchsorted(of.start_ns, to_ns, side="left")))


def assign_rows(start_ns: Ints, end_ns: Ints) -> Ints:
    """Return for each event (sorted by start, then the longest first) the first row that is free when it begins.

    Of events that nest it is the number of those around them. An event of no length takes a nanosecond here.
    """
    end_ns = np.maximum(end_ns, start_ns + 1)
    if not len(start_ns) or (start_ns[1:] >= np.maximum.accumulate(end_ns)[:-1]).all():
        return np.zeros(len(start_ns), dtype=np.int64)
    still_open = np.arange(len(start_ns)) - np.searchsorted(np.sort(end_ns), start_ns, side="right")
    order = np.argsort(still_open, kind="stable")
    same = still_open[order][1:] == still_open[order][:-1]
    if (start_ns[order][1:] >= end_ns[order][:-1])[same].all():
        return still_open
    # They overlap without nesting: one after the other
    found, taken, free, rows = [0] * len(start_ns), list[tuple[int, int]](), list[int](), 0
    for place, (start, end) in enumerate(zip(start_ns.tolist(), end_ns.tolist(), strict=True)):
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if free:
            depth = heapq.heappop(free)
        else:
            depth, rows = rows, rows + 1
        found[place] = depth
        heapq.heappush(taken, (end, depth))
    return np.array(found, dtype=np.int64)


LANE_TABLES = ("steps", "idle", "critical_path", "kernels", "launches", "ops", "marks", "frames")
"""Tables that hold the events; a row keeps the place in this tuple. Of events that begin and end together that of the later table is
the outer one."""

MAX_ROWS = 48
"""Rows kept of one lane (heuristic: PyTorch nests its ops about ten deep); what lies deeper is counted."""

_EVENT = {"start_ns": pl.Int64, "end_ns": pl.Int64, "code": pl.UInt8, "table": pl.UInt8, "id": pl.Int64}


class Lane(NamedTuple):
    """Events that belong together, in rows."""

    key: str
    """Unique and made of our own words and a number: 'steps', 'idle', 'path', 'stream-7', 'work-3', 'thread-3', 'python-3'."""
    number: int | None
    """Stream, or index into TraceMeta.threads."""
    rows: tuple[Row, ...]
    events: int
    """In the rows."""
    deeper: int
    """Events nested deeper than MAX_ROWS, in no row."""

    @property
    def kind(self) -> str:
        """Return the word of the key without its number."""
        return self.key.partition("-")[0]


def find_lanes(analysis: Analysis) -> tuple[Lane, ...]:
    """Return the lanes that hold events, in the order in which they are read: steps and causes, streams and threads by their time."""
    step = pl.when("analysed").then(pl.lit("step")).otherwise(pl.lit("step_left_out"))
    found = [
        _build_lane("steps", None, _read_events(analysis.steps, "steps", _encode_style(step))),
        _build_lane("idle", None, _read_events(analysis.idle, "idle", _encode_style(pl.col("cause")))),
    ]
    if analysis.critical_path is not None:  # its pieces of host time are drawn like the idle cause of their name
        bound = pl.col("bound")
        code = _encode_style(pl.when(bound.is_in(BOUNDS)).then(bound).otherwise(pl.lit("idle_") + bound))
        found.append(_build_lane("path", None, _read_events(analysis.critical_path, "critical_path", code)))
    work = analysis.trace.kernels.filter(pl.col("kind") != "cpu")
    if work.height:
        busy = work.group_by("stream").agg(pl.col("busy_ns").sum()).sort("busy_ns", "stream", descending=[True, False])
        parts = work.partition_by("stream", as_dict=True)
        for stream in busy["stream"]:
            number = -1 if stream is None else int(stream)
            events = _read_events(parts[(stream,)], "kernels", _encode_style(pl.col("bound")))
            found.append(_build_lane(f"stream-{number}", number, events))
    work = analysis.trace.kernels.filter(pl.col("kind") == "cpu")
    if work.height:  # of a CPU: pieces of time in which an op was the innermost one
        ops = analysis.trace.ops
        rows, spans = find_cpu_spans(ops, work, nest(ops))
        pieces = analysis.trace.kernels.select("id", "bound", "op")[rows]
        pieces = pieces.with_columns(pl.Series("start_ns", spans[:, 0]), pl.Series("end_ns", spans[:, 1]))
        parts = pieces.with_columns(ops["thread"].gather(pieces["op"])).partition_by("thread", as_dict=True)
        lasting = {int(thread): int((part["end_ns"] - part["start_ns"]).sum()) for (thread,), part in parts.items()}
        for thread in sorted(lasting, key=lambda one: (-lasting[one], one)):
            events = _read_events(parts[(thread,)], "kernels", _encode_style(pl.col("bound")))
            found.append(_build_lane(f"work-{thread}", thread, events))
    found += [_build_lane(f"thread-{number}", number, events) for number, events in _read_threads(analysis)]
    frames = _read_events(analysis.trace.frames, "frames", pl.lit(STYLES.index("frame")))
    stacks = frames.with_columns(analysis.trace.frames["thread"].cast(pl.Int64)).drop_nulls("thread")
    for (thread,), events in sorted(stacks.partition_by("thread", as_dict=True).items(), key=lambda part: -part[1].height):
        found.append(_build_lane(f"python-{thread}", int(str(thread)), events.drop("thread")))
    return tuple(lane for lane in found if lane.events)


def _build_lane(key: str, number: int | None, events: pl.DataFrame) -> Lane:
    """Return the lane of events (columns as _EVENT; rows without times are left out)."""
    events = events.drop_nulls(["start_ns", "end_ns"]).with_columns(pl.max_horizontal("start_ns", "end_ns").alias("end_ns"))
    events = events.sort("start_ns", "end_ns", "table", descending=[False, True, True], maintain_order=True)
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    depth = assign_rows(start, end)
    order = np.argsort(depth, kind="stable")
    cuts = np.searchsorted(depth[order], np.arange(1, min(MAX_ROWS, int(depth.max(initial=0)) + 1) + 1))
    columns = [events[name].to_numpy() for name in _EVENT]
    rows = tuple(build_row(*(column[chosen] for column in columns)) for chosen in np.split(order, cuts)[:-1])
    kept = sum(len(one.id) for one in rows)
    return Lane(key, number, rows, kept, len(depth) - kept)


def _read_events(frame: pl.DataFrame, table: str, code: pl.Expr) -> pl.DataFrame:
    return frame.select("start_ns", "end_ns", code.alias("code"), pl.lit(LANE_TABLES.index(table)).alias("table"), "id").cast(_EVENT)  # type: ignore[arg-type]


def _encode_style(words: pl.Expr) -> pl.Expr:
    return words.replace_strict({word: code for code, word in enumerate(STYLES)}, default=STYLES.index("unknown"), return_dtype=pl.UInt8)


def _read_threads(analysis: Analysis) -> Iterator[tuple[int, pl.DataFrame]]:
    """Yield (thread, events) of the host: annotations, ops and runtime calls; the thread with most ops and calls first."""
    trace = analysis.trace
    calls = np.full(trace.launches.height, STYLES.index("call"), dtype=np.uint8)
    if analysis.syncs is not None:
        waiting: Ints = analysis.syncs["launch"].drop_nulls().to_numpy()
        calls[waiting] = STYLES.index("wait")
    tables = (
        (trace.ops, "ops", pl.lit(STYLES.index("op"))),
        (trace.launches, "launches", pl.lit(pl.Series(calls))),
        (trace.marks, "marks", pl.lit(STYLES.index("mark"))),
    )
    frames = [_read_events(frame, table, code).with_columns(frame["thread"].cast(pl.Int64)) for frame, table, code in tables]
    parts = pl.concat(frames).drop_nulls("thread").partition_by("thread", as_dict=True)
    marks = LANE_TABLES.index("marks")
    work = {int(thread): int((part["table"] != marks).sum()) for (thread,), part in parts.items()}
    for thread in sorted(work, key=lambda one: (-work[one], one)):
        yield thread, parts[(thread,)].drop("thread")
