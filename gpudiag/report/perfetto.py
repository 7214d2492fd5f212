"""The overlay for Perfetto and chrome://tracing: tracks of a process 'gpudiag' beside those of the recording.

Format: Trace Event Format (Google, "Trace Event Format", 2016): complete events X, metadata M, counters C; times are microseconds of the
recording's own clock, written as decimal text, so that no nanosecond is lost.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import polars as pl

from gpudiag.model.analysis import Analysis
from gpudiag.model.trace import Trace

CATEGORY = "gpudiag"
"""Category of our events: the reader ignores it, so that an exported trace is read like the original."""

_TRACKS = {1: "critical path", 2: "idle: cause", 3: "steps"}
_CRITICAL, _IDLE, _STEPS = _TRACKS
_PID = 67_707_564
"""Process id to begin with: far above the ids that systems give (at most 4,194,304 on Linux)."""
_GZIP_WINDOW_BITS = 31  # zlib manual, deflateInit2: 15 bits of window + 16 for a gzip header
_GZIP_LEVEL = 6


def overlay(analysis: Analysis) -> Iterator[bytes]:
    """Yield the events of the overlay, each a JSON object: names of the tracks, critical path, idle causes, steps, queue depth."""
    pid, base = _free_pid(analysis.trace), analysis.trace.meta.base_ns
    for event in _names(pid):
        yield msgspec.json.encode(event)
    for track, rows in ((_CRITICAL, _critical(analysis)), (_IDLE, _idle(analysis)), (_STEPS, _steps(analysis))):
        for start, end, name, args in rows:
            yield msgspec.json.encode(_complete(pid, track, name, base + start, end - start, args))
    for event in _depth(analysis, pid, base):
        yield msgspec.json.encode(event)


def document(events: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `events` as a trace of their own."""
    between = b'{"traceEvents":[\n'
    for event in events:
        yield between + event
        between = b",\n"
    yield (between if between[0:1] == b"{" else b"") + b"\n]}\n"


def gzipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `pieces` compressed."""
    deflate = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW_BITS)
    for piece in pieces:
        yield deflate.compress(piece)
    yield deflate.flush()


def microseconds(ns: int) -> msgspec.Raw:
    """Return a time in ns as the JSON text of its microseconds, exactly."""
    whole, rest = divmod(abs(ns), 1000)
    return msgspec.Raw(f"{'-' if ns < 0 else ''}{whole}.{rest:03d}".encode())


def _free_pid(trace: Trace) -> int:
    """Return a process id that the recording does not use."""
    taken = {thread.pid for thread in trace.meta.threads}
    pid = _PID
    while str(pid) in taken:
        pid += 1
    return pid


def _names(pid: int) -> Iterator[dict[str, Any]]:
    """Yield the metadata that names the process and its tracks, and puts them on top."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": "gpudiag"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": -1}}
    for track, name in _TRACKS.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "ts": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": track, "ts": 0, "args": {"sort_index": track}}


def _complete(pid: int, track: int, name: str, start: int, length: int, args: dict[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in args.items() if value is not None}
    times = {"ts": microseconds(start), "dur": microseconds(length)}
    return {"ph": "X", "cat": CATEGORY, "name": name, "pid": pid, "tid": track, **times, "args": shown}


_Row = tuple[int, int, str, dict[str, Any]]


def _critical(analysis: Analysis) -> Iterator[_Row]:
    """Yield the pieces of the critical path, named by what bounds them."""
    path = analysis.critical_path
    if path is None:
        return
    work = analysis.trace.kernels.select(pl.col("id").alias("kernel"), pl.col("name").cast(pl.String).alias("kernel_name"))
    named = _with_op(path, analysis.trace).join(work, on="kernel", how="left", maintain_order="left")
    for row in named.iter_rows(named=True):
        args = {"kind": row["kind"], "op": row["op_name"], "kernel": row["kernel_name"], "stream": row["stream"]}
        yield row["start_ns"], row["end_ns"], row["bound"], args


def _idle(analysis: Analysis) -> Iterator[_Row]:
    """Yield the idle pieces of the device, named by their cause."""
    for row in _with_op(analysis.idle, analysis.trace).iter_rows(named=True):
        args = {"evidence": row["evidence"], "site": row["site"], "op": row["op_name"], "gap": row["kind"]}
        yield row["start_ns"], row["end_ns"], row["cause"].removeprefix("idle_"), args


def _steps(analysis: Analysis) -> Iterator[_Row]:
    for row in analysis.steps.iter_rows(named=True):
        yield row["start_ns"], row["end_ns"], row["name"], {"analysed": row["analysed"], "found by": analysis.steps_source}


def _with_op(frame: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """Return `frame` with the name of its op as op_name."""
    names = trace.ops.select(pl.col("id").alias("op"), pl.col("name").cast(pl.String).alias("op_name"))
    return frame.join(names, on="op", how="left", maintain_order="left")


def _depth(analysis: Analysis, pid: int, base: int) -> Iterator[dict[str, Any]]:
    """Yield the depth of the launch queue over time as a counter."""
    if analysis.queue is None:
        return
    for moment, depth in zip(analysis.queue.t_ns, analysis.queue.depth, strict=True):
        counter = {"ph": "C", "cat": CATEGORY, "name": "queue depth", "pid": pid, "tid": 0}
        yield {**counter, "ts": microseconds(base + moment), "args": {"kernels": round(depth, 3)}}
