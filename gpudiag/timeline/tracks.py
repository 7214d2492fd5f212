"""The lanes of a time line: steps, idle causes, longest path, the work of the device, the host threads; each as rows without overlap.

The work of a GPU stands in a lane for each stream, that of a CPU in one for each thread: the ops without those inside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import polars as pl

from gpudiag.attribution.cpu import cpu_spans
from gpudiag.attribution.nesting import Ids, nest
from gpudiag.model.analysis import Analysis
from gpudiag.model.cost import BOUNDS
from gpudiag.timeline.lanes import STYLES, Row, depths, row

TABLES = ("steps", "idle", "critical_path", "kernels", "launches", "ops", "marks")
"""Tables that hold the events; a row keeps the place in this tuple. Of events that begin and end together that of the later table is
the outer one."""

MAX_ROWS = 48
"""Rows kept of one lane (heuristic: PyTorch nests its ops about ten deep); what lies deeper is counted."""

_EVENT = {"start_ns": pl.Int64, "end_ns": pl.Int64, "code": pl.UInt8, "table": pl.UInt8, "id": pl.Int64}


class Lane(NamedTuple):
    """Events that belong together, in rows."""

    key: str
    """Unique and made of our own words and a number: 'steps', 'idle', 'path', 'stream-7', 'work-3', 'thread-3'."""
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
    found = [_lane("steps", None, _steps(analysis)), _lane("idle", None, _idle(analysis)), _lane("path", None, _path(analysis))]
    found += [_lane(f"stream-{number}", number, events) for number, events in _streams(analysis)]
    found += [_lane(f"work-{number}", number, events) for number, events in _own_work(analysis)]
    found += [_lane(f"thread-{number}", number, events) for number, events in _threads(analysis)]
    return tuple(lane for lane in found if lane.events)


def _lane(key: str, number: int | None, events: pl.DataFrame) -> Lane:
    """Return the lane of events (columns as _EVENT; rows without times are left out)."""
    events = events.drop_nulls(["start_ns", "end_ns"]).with_columns(pl.max_horizontal("start_ns", "end_ns").alias("end_ns"))
    events = events.sort("start_ns", "end_ns", "table", descending=[False, True, True], maintain_order=True)
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    depth = depths(start, end)
    order = np.argsort(depth, kind="stable")
    cuts = np.searchsorted(depth[order], np.arange(1, min(MAX_ROWS, int(depth.max(initial=0)) + 1) + 1))
    columns = [events[name].to_numpy() for name in _EVENT]
    rows = tuple(row(*(column[chosen] for column in columns)) for chosen in np.split(order, cuts)[:-1])
    kept = sum(len(one.id) for one in rows)
    return Lane(key, number, rows, kept, len(depth) - kept)


def _events(frame: pl.DataFrame, table: str, code: pl.Expr) -> pl.DataFrame:
    """Return the events of a table; `code`: a place in STYLES."""
    return frame.select("start_ns", "end_ns", code.alias("code"), pl.lit(TABLES.index(table)).alias("table"), "id").cast(_EVENT)  # type: ignore[arg-type]


def _style(words: pl.Expr) -> pl.Expr:
    """Return the codes of styles by name, that of 'unknown' for other words."""
    return words.replace_strict({word: code for code, word in enumerate(STYLES)}, default=STYLES.index("unknown"), return_dtype=pl.UInt8)


def _steps(analysis: Analysis) -> pl.DataFrame:
    return _events(analysis.steps, "steps", _style(pl.when("analysed").then(pl.lit("step")).otherwise(pl.lit("step_left_out"))))


def _idle(analysis: Analysis) -> pl.DataFrame:
    return _events(analysis.idle, "idle", _style(pl.col("cause")))


def _path(analysis: Analysis) -> pl.DataFrame:
    """Return the pieces of the longest path; those of host time are drawn like the idle cause of their name."""
    path = analysis.critical_path
    if path is None:
        return pl.DataFrame(schema=_EVENT)
    bound = pl.col("bound")
    return _events(path, "critical_path", _style(pl.when(bound.is_in(BOUNDS)).then(bound).otherwise(pl.lit("idle_") + bound)))


def _streams(analysis: Analysis) -> Iterator[tuple[int, pl.DataFrame]]:
    """Yield (stream, events) of the device, the busiest first."""
    work = analysis.trace.kernels.filter(pl.col("kind") != "cpu")
    if not work.height:
        return
    busy = work.group_by("stream").agg(pl.col("busy_ns").sum()).sort("busy_ns", "stream", descending=[True, False])
    parts = work.partition_by("stream", as_dict=True)
    for stream in busy["stream"]:
        yield -1 if stream is None else int(stream), _events(parts[(stream,)], "kernels", _style(pl.col("bound")))


def _own_work(analysis: Analysis) -> Iterator[tuple[int, pl.DataFrame]]:
    """Yield (thread, events) of the work of a CPU, the busiest thread first: pieces of time in which an op was the innermost one."""
    trace = analysis.trace
    work = trace.kernels.filter(pl.col("kind") == "cpu")
    if not work.height:
        return
    rows, spans = cpu_spans(trace.ops, work, nest(trace.ops))
    found = trace.kernels.select("id", "bound", "op")[rows].with_columns(
        pl.Series("start_ns", spans[:, 0]), pl.Series("end_ns", spans[:, 1])
    )
    found = found.with_columns(trace.ops["thread"].gather(found["op"]))
    parts = found.partition_by("thread", as_dict=True)
    busy = {int(thread): int((part["end_ns"] - part["start_ns"]).sum()) for (thread,), part in parts.items()}
    for thread in sorted(busy, key=lambda one: (-busy[one], one)):
        yield thread, _events(parts[(thread,)], "kernels", _style(pl.col("bound")))


def _threads(analysis: Analysis) -> Iterator[tuple[int, pl.DataFrame]]:
    """Yield (thread, events) of the host: annotations, ops and runtime calls; the thread with most ops and calls first."""
    trace = analysis.trace
    frames = (
        _events_of_threads(trace.ops, "ops", pl.lit(STYLES.index("op"))),
        _events_of_threads(trace.launches, "launches", _call_style(analysis)),
        _events_of_threads(trace.marks, "marks", pl.lit(STYLES.index("mark"))),
    )
    parts = pl.concat(frames).drop_nulls("thread").partition_by("thread", as_dict=True)
    marks = TABLES.index("marks")
    work = {int(thread): int((part["table"] != marks).sum()) for (thread,), part in parts.items()}
    for thread in sorted(work, key=lambda one: (-work[one], one)):
        yield thread, parts[(thread,)].drop("thread")


def _events_of_threads(frame: pl.DataFrame, table: str, code: pl.Expr) -> pl.DataFrame:
    return _events(frame, table, code).with_columns(frame["thread"].cast(pl.Int64))


def _call_style(analysis: Analysis) -> pl.Expr:
    """Return the codes of runtime calls: whether they wait for the device."""
    codes = np.full(analysis.trace.launches.height, STYLES.index("call"), dtype=np.uint8)
    if analysis.syncs is not None:
        waiting: Ids = analysis.syncs["launch"].drop_nulls().to_numpy()
        codes[waiting] = STYLES.index("wait")
    return pl.lit(pl.Series(codes))
