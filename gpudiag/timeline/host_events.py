"""What the host threads did that keeps a device waiting: events with a cause, its evidence in words, and the place where known."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution.sites import frame_threads
from gpudiag.model.trace import Trace
from gpudiag.timeline import host_patterns
from gpudiag.timeline.host_threads import main_thread, plain_frame
from gpudiag.trace import kernel_names

CAUSES = ("idle_profiler", "idle_gc", "idle_compile", "idle_data", "idle_io", "idle_allocation", "idle_sync")
"""Causes that an event shows, most specific first. A collection inside a loader call is gc, a file that a loader reads is data."""

LOADING_NS = 100_000
"""The first launch of a kernel that takes this long, and LOADING_FACTOR times the median launch, loads the kernel's code: launches cost
some microseconds, lazy loading (CUDA_MODULE_LOADING=LAZY, CUDA C++ Programming Guide) from tenths of a millisecond up."""

LOADING_FACTOR = 10

_SCHEMA = {
    "thread": pl.Int64(), "start_ns": pl.Int64(), "end_ns": pl.Int64(), "cause": pl.String(), "evidence": pl.String(), "site": pl.String(),
}  # fmt: skip

_MARK_KINDS = {"gc": "idle_gc", "save": "idle_io", "file_write": "idle_io", "loader": "idle_data"}

_HOST_WORDS = {
    "gc": pl.format("garbage collection ({})", "name"),
    "save": pl.col("name"),
    "file_write": pl.format("{} opened for writing", "name"),
    "loader": pl.lit("the next batch was asked for"),
}


def host_events(trace: Trace, frames: pl.DataFrame, host_marks: pl.DataFrame | None, *, on_cpu: bool) -> pl.DataFrame:
    """Return the events (thread, start_ns, end_ns, cause, evidence, site); thread null: every thread stood still.

    `frames`: those of the trace on the threads of the ops; `host_marks`: those of the bundle. `on_cpu`: waiting for other threads counts.
    """
    found = [
        _named(frames, "name", host_patterns.FRAMES | ({"idle_sync": host_patterns.WAIT_FRAMES} if on_cpu else {})),
        _named(trace.marks.filter(pl.col("category") == "annotation"), "name", host_patterns.MARKS),
        _named(trace.ops, "name", host_patterns.MARKS),
        _named(trace.launches, "api", host_patterns.CALLS),
        _overheads(trace),
        _first_launches(trace),
        _bundle_marks(trace, host_marks),
    ]
    events = pl.concat([frame.select(list(_SCHEMA)).cast(_SCHEMA) for frame in found])  # type: ignore[arg-type]
    return events.filter(pl.col("end_ns") > pl.col("start_ns"))


def own_frames(trace: Trace) -> pl.DataFrame:
    """Return the frames of `trace` on the thread whose ops they run (some schemas write tid 0 for frames), sorted for nesting."""
    threads = trace.ops["thread"].drop_nulls().to_numpy()
    if not trace.frames.height or not len(threads):
        return trace.frames
    main = int(np.bincount(threads[threads >= 0]).argmax())
    target = int(frame_threads(trace, np.append(threads, main))[-1])
    if target == main:
        return trace.frames
    moved = trace.frames.with_columns(pl.col("thread").replace({target: main}))
    return moved.sort("thread", "start_ns", pl.col("end_ns"), descending=[False, False, True], maintain_order=True)


def _named(frame: pl.DataFrame, column: str, patterns: dict[str, str]) -> pl.DataFrame:
    """Return the rows whose name a pattern matches, with the first such cause; each distinct name is matched once."""
    names = frame.select(column).unique().with_columns(text=pl.col(column).cast(pl.String))
    cause = pl.coalesce([pl.when(pl.col("text").str.contains(pattern)).then(pl.lit(word)) for word, pattern in patterns.items()])
    known = names.with_columns(cause.alias("cause"), evidence=plain_frame("text")).drop_nulls("cause").drop("text")
    return frame.join(known, on=column, how="inner").with_columns(site=pl.lit(None, dtype=pl.String))


def _overheads(trace: Trace) -> pl.DataFrame:
    """Return the profiler's own overhead records. One on a thread that issues nothing did not stop those that do: it is left out."""
    marks = trace.marks.filter(pl.col("category") == "overhead")
    issuing = pl.concat([trace.ops["thread"], trace.launches["thread"]]).drop_nulls().unique()
    found = _named(marks, "name", host_patterns.OVERHEADS)
    return found.filter(pl.col("thread").is_null() | pl.col("thread").is_in(issuing.implode()))


def _first_launches(trace: Trace) -> pl.DataFrame:
    """Return the launches that took as long as they did because the driver loaded the kernel's code first."""
    calls = trace.launches.filter(pl.col("api").cast(pl.String).str.contains(kernel_names.KERNEL_LAUNCH))
    duration = pl.col("end_ns") - pl.col("start_ns")
    usual = calls.select(duration.median()).item() or 0
    slow = calls.filter(duration > max(LOADING_NS, LOADING_FACTOR * usual)).select("id", "thread", "start_ns", "end_ns")
    kernels = trace.kernels.filter(pl.col("kind") == "kernel").select("name", "launch").drop_nulls("launch")
    first = kernels.sort("launch").unique("name", keep="first", maintain_order=True)
    found = slow.join(first, left_on="id", right_on="launch", how="inner").unique("id", keep="first", maintain_order=True)
    words = pl.format("first launch of {}: its code was loaded", pl.col("name").cast(pl.String).str.slice(0, 60))
    return found.with_columns(cause=pl.lit("idle_compile"), evidence=words, site=pl.lit(None, dtype=pl.String))


def _bundle_marks(trace: Trace, marks: pl.DataFrame | None) -> pl.DataFrame:
    """Return the host marks of a bundle in the trace's time. Of an opened file only the start is known: until the next recorded event."""
    if marks is None or trace.meta.unix_base_ns is None:
        return pl.DataFrame(schema=_SCHEMA)
    start = pl.col("start_unix_ns") - trace.meta.unix_base_ns
    main = main_thread(trace)
    elsewhere = pl.col("name").str.ends_with("in another thread").fill_null(False)
    known = marks.filter(pl.col("kind").is_in(list(_MARK_KINDS)) & ~elsewhere).select(
        pl.when(pl.col("kind") == "gc").then(None).otherwise(pl.lit(main)).alias("thread"),  # a collection holds the interpreter's lock
        start.alias("start_ns"),
        pl.when(pl.col("duration_ns") > 0).then(start + pl.col("duration_ns")).alias("end_ns"),
        pl.col("kind").replace_strict(_MARK_KINDS, default=None, return_dtype=pl.String).alias("cause"),
        pl.coalesce([pl.when(pl.col("kind") == kind).then(words) for kind, words in _HOST_WORDS.items()]).alias("evidence"),
        pl.col("site").str.replace(r"^(.*):(\d+)$", "${1}(${2})"),
    )
    begins = np.sort(pl.concat([frame.filter(pl.col("thread") == main)["start_ns"] for frame in (trace.ops, trace.launches)]).to_numpy())
    following = np.append(begins, np.iinfo(np.int64).max)[np.searchsorted(begins, known["start_ns"].to_numpy(), side="right")]
    until = pl.Series("until", np.where(following == np.iinfo(np.int64).max, known["start_ns"].to_numpy(), following))
    return known.with_columns(pl.col("end_ns").fill_null(until))
