"""Which threads are responsible for issuing the device's work, and when each of them was active."""

from __future__ import annotations

import itertools
from functools import cached_property

import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.attribution.names import matches, matching, text
from gpudiag.attribution.nesting import Nesting, Rows, nest, self_spans
from gpudiag.attribution.recompute import autograd_nodes
from gpudiag.attribution.sites import Frames
from gpudiag.model.trace import Trace
from gpudiag.timeline import host_patterns
from gpudiag.timeline.segments import joined, most_held
from gpudiag.trace import kernel_names

Ints = npt.NDArray[np.int64]

CLOSE_NS = 200_000
"""A pause between two recorded events of a thread up to this long is Python at work between them: some thousand bytecodes of the
interpreter at about 50 ns each, with the profiler on."""

CLOSE_FACTOR = 10
"""Or up to this many times the median pause of the trace, where that is longer ..."""

CLOSE_MOST_NS = 1_000_000
"""... but never longer than this: in a millisecond a thread may as well have slept."""

_OWN, _DEMO = r"(^|/)gpudiag/(?:capture|integrations)/", r"(^|/)gpudiag/capture/demo\.py\("
"""Frames of what records a training; the demo's loop is a training."""

NOBODY = -1

_NOTHING = (intervals.NONE, np.empty(0, dtype=np.int64))

MAX_THREADS = 256
"""Threads that are asked one by one what they did, the busiest first: training issues from a handful, only a broken file has more."""


def main_thread(trace: Trace) -> int:
    """Return the thread that runs the training loop: that of the step marks where it has ops, else the one with the most ops or calls."""
    counts = pl.concat([trace.ops["thread"], trace.launches["thread"]]).drop_nulls().value_counts().sort("count", "thread")
    busy = counts["thread"].to_list()
    marks = trace.marks.filter(matches("name", kernel_names.STEP_MARK))["thread"].drop_nulls().unique()
    stepping = [thread for thread in busy if thread in set(marks.to_list())]
    return int((stepping or busy or [NOBODY])[-1])


def crew(trace: Trace) -> tuple[int, ...]:
    """Return the main thread and the threads of autograd, MAX_THREADS at most: while one of them works, the others may wait for it."""
    main = main_thread(trace)
    nodes = trace.ops["thread"].filter(pl.Series(autograd_nodes(trace.ops), dtype=pl.Boolean)).drop_nulls().value_counts()
    busiest = nodes.filter(pl.col("thread") != main).sort("count", "thread", descending=[True, False])["thread"]
    return (main, *busiest.head(MAX_THREADS).sort().to_list())


class Host:
    """What is recorded of the host threads: pieces of time in which each op, call or frame was the innermost one."""

    def __init__(self, trace: Trace, frames: Frames, within: intervals.Spans | None = None) -> None:
        """`within`: what frames held is asked for no time outside these spans."""
        self.crew = crew(trace)
        self._calls = trace.launches
        self._recorded: dict[tuple[int, ...], intervals.Spans] = {}
        self._marks = trace.marks.filter(matches("name", f"{kernel_names.LOADER_MARK}|{kernel_names.OPTIMIZER_MARK}"))
        self.ranges = _ranges(trace)
        self.frames = frames.table
        self._ops, self._leaves = _by_thread(nest(trace.ops)), _by_thread(frames.nesting, within)
        self.user = frames.user
        self._codes = self.frames["name"].to_physical().to_numpy()

    def ops_of(self, thread: int) -> tuple[intervals.Spans, Ints]:
        """Return (spans, op rows) of one thread: which op was the innermost, when."""
        return self._ops.get(thread, _NOTHING)

    def leaves_of(self, thread: int) -> tuple[intervals.Spans, Ints]:
        """Return (spans, rows of frames) of one thread: which frame was the innermost, when."""
        return self._leaves.get(thread, _NOTHING)

    def forget(self) -> None:
        """Let go of what the threads did: nothing is asked of it any more."""
        self._ops, self._leaves, self._recorded, self.user = {}, {}, {}, self.user[:0].copy()

    def held_frames(self, thread: int, start: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Return the codes (see words) of the innermost frame and of the user's own one that hold most of each [start, end), -1: none."""
        spans, leaves = self.leaves_of(thread)
        user = self.user[leaves]
        leaf = most_held(start, end, spans, self.codes(leaves))[0]
        return leaf, most_held(start, end, spans[user >= 0], self.codes(user[user >= 0]))[0]

    def codes(self, rows: Rows) -> Ints:
        """Return the codes (see words) of these rows of frames."""
        found: Ints = self._codes[rows].astype(np.int64)
        return found

    def words(self) -> pl.DataFrame:
        """Return the distinct names of frames: code, text, and `told`, the name as people say it."""
        names = self.frames.select(pl.col("name").unique()).with_columns(code=pl.col("name").to_physical().cast(pl.Int64))
        return names.select("code", text=text("name")).with_columns(told=plain_frame("text"))

    def active(self, threads: tuple[int, ...], close: int) -> intervals.Spans:
        """Return when one of `threads` was in an op, a call, a range of the user's, a frame that is no mere wait, or between close ones."""
        recorded = joined(self.recorded(threads), close)
        framed = [intervals.union(spans[self._working(rows)]) for spans, rows in (self.leaves_of(thread) for thread in threads)]
        ranges = intervals.of(self.ranges.filter(pl.col("thread").is_in(list(threads))))
        return intervals.union(np.concatenate([recorded, ranges, *framed]))

    def _working(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Return which of these rows of frames are no mere wait."""
        return ~matching(self.frames["name"].gather(rows), host_patterns.HANDED_OVER)

    def recorded(self, threads: tuple[int, ...]) -> intervals.Spans:
        """Return the union of the ops, calls, loader and optimizer marks on `threads`."""
        if threads not in self._recorded:
            ops = [intervals.union(self.ops_of(thread)[0]) for thread in threads]  # far fewer spans: pieces of nested ops touch
            within = pl.col("thread").is_in(list(threads))
            rest = (intervals.of(self._calls.filter(within)), intervals.of(self._marks.filter(within)))
            self._recorded[threads] = intervals.union(np.concatenate([*ops, *rest]))
        return self._recorded[threads]

    @cached_property
    def close_ns(self) -> int:
        """Return how long a pause between two events may be and still count as Python at work, by the pauses of this trace."""
        spans = self.recorded(self.crew)
        pauses = spans[1:, 0] - spans[:-1, 1]
        usual = float(np.median(pauses)) if len(pauses) else 0.0
        return int(min(max(CLOSE_FACTOR * usual, CLOSE_NS), CLOSE_MOST_NS))


def plain_frame(column: str) -> pl.Expr:
    """Return the name of a frame as people say it: '<built-in function sleep>' is 'sleep()', 'a/b.py(3): f' is 'f() of b.py'.

    What records a training is called gpudiag's: nobody knows it for a part of the program.
    """
    name = pl.col(column)
    builtin = name.str.extract(r"^<built-in (?:function|method) ([\w.]+)")
    function, file = name.str.extract(r"\(\d+\): (.+)$"), name.str.extract(r"([^/]+)\(\d+\): ")
    own = name.str.contains(_OWN) & ~name.str.contains(_DEMO)
    said = pl.format("{}() of {}", function, pl.when(own).then(pl.format("gpudiag's {}", file)).otherwise(file))
    return pl.coalesce(pl.format("{}()", builtin), said, name)


def _ranges(trace: Trace) -> pl.DataFrame:
    """Return the record_function ranges that say where in the program a thread is: no steps, and none that holds half of the recording."""
    name, length = text("name"), pl.col("end_ns") - pl.col("start_ns")
    found = trace.marks.filter((pl.col("category") == "annotation") & ~name.str.contains(kernel_names.STEP_MARK) & (length > 0))
    begin = [frame["start_ns"].min() for frame in (trace.ops, trace.launches, found) if frame.height]
    end = [frame["end_ns"].max() for frame in (trace.ops, trace.launches, found) if frame.height]
    extent = max(end, default=0) - min(begin, default=0)  # type: ignore[type-var, operator]
    return found.filter(2 * length < extent)


def _by_thread(nesting: Nesting, within: intervals.Spans | None = None) -> dict[int, tuple[intervals.Spans, Ints]]:
    """Return (spans, rows) of the pieces of each thread."""
    rows, spans = self_spans(nesting, within)
    threads = nesting.thread[rows]
    begins = np.flatnonzero(threads[1:] != threads[:-1]) + 1  # self_spans keeps threads together
    pieces = itertools.pairwise([0, *begins.tolist(), len(rows)]) if len(rows) else ()
    return {int(threads[first]): (spans[first:last], rows[first:last]) for first, last in pieces}
