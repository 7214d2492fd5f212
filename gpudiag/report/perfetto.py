"""The overlay for Perfetto and chrome://tracing: tracks of a process 'gpudiag' beside those of the recording.

Slices: longest path, idle causes, steps, and the work of each stream or thread by its bound. Counters: depth of the launch queue, and what
was sampled of the device meanwhile.

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
from gpudiag.report.perfetto_bounds import Row, Track, tracks

CATEGORY = "gpudiag"
"""Category of our events: the reader ignores it, so that an exported trace is read like the original."""

_TRACKS = {1: "critical path", 2: "idle: cause", 3: "steps"}
_CRITICAL, _IDLE, _STEPS = _TRACKS
_PID = 67_707_564
"""Process id to begin with: far above the ids that systems give (at most 4,194,304 on Linux)."""
_GZIP_WINDOW_BITS = 31  # zlib manual, deflateInit2: 15 bits of window + 16 for a gzip header
_GZIP_LEVEL = 6


_COUNTERS = {
    "sm_clock_mhz": ("SM clock", "MHz", 1.0),
    "power_w": ("power", "W", 1.0),
    "temperature_c": ("temperature", "C", 1.0),
    "gpu_util_pct": ("GPU utilisation", "%", 1.0),
    "mem_used_bytes": ("device memory in use", "GB", 1e-9),
    "cpu_util_pct": ("CPU of this process", "% of a core", 1.0),
}
"""Column of table telemetry -> name, unit and factor of its counter."""


def overlay(analysis: Analysis, samples: pl.DataFrame | None = None) -> Iterator[bytes]:
    """Yield the events of the overlay, each a JSON object: names of the tracks, then slices and counters, track by track.

    `samples`: table telemetry of the analysed device; what of it falls into the recorded steps becomes counters.
    """
    for event in _events(analysis, samples):
        yield msgspec.json.encode(event)


def _events(analysis: Analysis, samples: pl.DataFrame | None) -> Iterator[dict[str, Any]]:
    pid, base = _free_pid(analysis.trace), analysis.trace.meta.base_ns
    bounds = list(tracks(analysis))
    yield from _names(pid, bounds)
    fixed = ((_CRITICAL, _critical(analysis)), (_IDLE, _idle(analysis)), (_STEPS, _steps(analysis)))
    for track, rows in (*fixed, *((track.number, track.slices()) for track in bounds)):
        for start, end, name, args in rows:
            yield _complete(pid, track, name, base + start, end - start, args)
    yield from _depth(analysis, pid, base)
    if samples is not None:
        yield from _sampled(analysis, samples, pid, base)


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


def _names(pid: int, bounds: Iterable[Track]) -> Iterator[dict[str, Any]]:
    """Yield the metadata that names the process and its tracks, and puts them on top."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": "gpudiag"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": -1}}
    for track, name in (*_TRACKS.items(), *((track.number, track.name) for track in bounds)):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "ts": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": track, "ts": 0, "args": {"sort_index": track}}


def _complete(pid: int, track: int, name: str, start: int, length: int, args: dict[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in args.items() if value is not None}
    times = {"ts": microseconds(start), "dur": microseconds(length)}
    return {"ph": "X", "cat": CATEGORY, "name": name, "pid": pid, "tid": track, **times, "args": shown}


def _critical(analysis: Analysis) -> Iterator[Row]:
    """Yield the pieces of the critical path, named by what bounds them."""
    path = analysis.critical_path
    if path is None:
        return
    work = analysis.trace.kernels.select(pl.col("id").alias("kernel"), pl.col("name").cast(pl.String).alias("kernel_name"))
    named = _with_op(path, analysis.trace).join(work, on="kernel", how="left", maintain_order="left")
    for row in named.iter_rows(named=True):
        args = {"kind": row["kind"], "op": row["op_name"], "kernel": row["kernel_name"], "stream": row["stream"]}
        yield row["start_ns"], row["end_ns"], row["bound"], args


def _idle(analysis: Analysis) -> Iterator[Row]:
    """Yield the idle pieces of the device, named by their cause."""
    for row in _with_op(analysis.idle, analysis.trace).iter_rows(named=True):
        args = {"evidence": row["evidence"], "site": row["site"], "op": row["op_name"], "gap": row["kind"]}
        yield row["start_ns"], row["end_ns"], row["cause"].removeprefix("idle_"), args


def _steps(analysis: Analysis) -> Iterator[Row]:
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
        yield _counter(pid, base + moment, "queue depth", "kernels", round(depth, 3))


def _sampled(analysis: Analysis, samples: pl.DataFrame, pid: int, base: int) -> Iterator[dict[str, Any]]:
    """Yield what was sampled from the first to the last recorded step; nothing where the trace has no Unix time."""
    zero, steps = analysis.trace.meta.unix_base_ns, analysis.steps
    if zero is None or not steps.height:
        return
    first, last = steps["start_ns"].min(), steps["end_ns"].max()
    within = samples.with_columns(at=pl.col("t_ns") - zero).filter(pl.col("at").is_between(first, last)).sort("at")
    for column, (name, unit, factor) in _COUNTERS.items():
        for moment, value in within.select("at", column).drop_nulls().iter_rows():
            yield _counter(pid, base + moment, name, unit, round(value * factor, 3))


def _counter(pid: int, at: int, name: str, unit: str, value: float) -> dict[str, Any]:
    """Return a value of a counter; its unit is the name of its series, and stands in its name too, which viewers show."""
    counter = {"ph": "C", "cat": CATEGORY, "name": f"{name} ({unit})", "pid": pid, "tid": 0}
    return {**counter, "ts": microseconds(at), "args": {unit: value}}
