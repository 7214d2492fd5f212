"""Exports: the Perfetto overlay, and tables as CSV or Parquet with units in their names.

Slices: longest path, idle causes, steps, and the work of each stream or thread by its bound. Counters: depth of the launch queue, and what
was sampled of the device meanwhile.

Format: Trace Event Format (Google, "Trace Event Format", 2016): complete events X, metadata M, counters C; times are microseconds of the
recording's own clock, written as decimal text, so that no nanosecond is lost.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from gpudiag.model.analysis import Analysis
from gpudiag.model.trace import TABLES, Column, Trace
from gpudiag.report.console import clean

Ints = npt.NDArray[np.int64]
SliceRow = tuple[int, int, str, dict[str, Any]]
"""Start and end in ns from the trace's base, name, arguments."""

FIRST_TRACK = 10
"""Number of the first of these tracks; those below are the overlay's fixed ones."""

_LONGEST = 60
"""Characters of a thread's name in the name of its track."""


class Track(NamedTuple):
    """One line of the time line."""

    number: int
    name: str
    rows: pl.DataFrame

    def slices(self) -> Iterator[SliceRow]:
        """Yield its pieces by start, each named by its bound."""
        for row in self.rows.iter_rows(named=True):
            args = {
                "op": row["op_name"],
                "work": row["name"],
                "efficiency_share": _round(row["efficiency"]),
                "roofline_time_ns": _round(row["t_roof_ns"], 1),
                "flop": row["flops"],
                "moved_bytes": row["bytes_moved"],
                "cost": row["provenance"],
            }
            yield row["start_ns"], row["end_ns"], row["bound"] or "unknown", args


def build_tracks(analysis: Analysis) -> Iterator[Track]:
    """Yield the tracks of the work of the analysed device, in the order of streams or threads."""
    rows, number = _build_work_rows(analysis.trace), FIRST_TRACK
    for (line,), group in rows.group_by("line", maintain_order=True):
        name = _name_track(analysis.trace, line, on_cpu=analysis.device_index is None)
        group = group.sort("start_ns", -pl.col("end_ns"))
        lanes = assign_lanes(group["start_ns"].to_numpy(), group["end_ns"].to_numpy())
        for lane in range(int(lanes.max(initial=0)) + 1):
            more = f" ({lane + 1})" if lane else ""
            yield Track(number, f"bound: {name}{more}", group.filter(pl.Series(lanes == lane)))
            number += 1


def _build_work_rows(trace: Trace) -> pl.DataFrame:
    """Return the work with the name of its op and `line`: its stream, for work of a CPU its thread."""
    ops = trace.ops.select(pl.col("id").alias("op"), pl.col("name").cast(pl.String).alias("op_name"), "thread")
    wanted = (
        "start_ns",
        "end_ns",
        "name",
        "bound",
        "efficiency",
        "t_roof_ns",
        "flops",
        "bytes_moved",
        "provenance",
        "op",
        "stream",
        "kind",
    )
    joined = trace.kernels.select(wanted).with_columns(pl.col("name").cast(pl.String)).join(ops, on="op", how="left", maintain_order="left")
    line = pl.when(pl.col("kind") == "cpu").then(pl.col("thread")).otherwise(pl.col("stream"))
    return joined.with_columns(line=line).sort("line", maintain_order=True, nulls_last=True)


def _name_track(trace: Trace, line: object, *, on_cpu: bool) -> str:
    if not isinstance(line, int):
        return "thread not known" if on_cpu else "stream not known"
    if not on_cpu:
        return f"stream {line}"
    thread = trace.meta.threads[line] if 0 <= line < len(trace.meta.threads) else None
    return f"thread {clean(thread.name or thread.tid, _LONGEST)}" if thread else f"thread {line}"


def assign_lanes(starts: Ints, ends: Ints) -> Ints:
    """Return a lane for each piece, so that two pieces of one lane are apart or one holds the other, as viewers draw them.

    The pieces come by start, of those that start together the longest first. The first lane that takes a piece gets it.
    """
    found = np.zeros(len(starts), dtype=np.int64)
    if len(starts) < 2 or bool((starts[1:] >= ends[:-1]).all()):
        return found
    open_ends: list[list[int]] = []
    for place, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        found[place] = _choose_lane(open_ends, start, end)
    return found


def _choose_lane(open_ends: list[list[int]], start: int, end: int) -> int:
    """Return the lane that takes a piece, and put it there; `open_ends`: of each lane the ends of the pieces that are open, inner last."""
    for lane, ends in enumerate(open_ends):
        while ends and ends[-1] <= start:
            ends.pop()
        if not ends or end <= ends[-1]:
            ends.append(end)
            return lane
    open_ends.append([end])
    return len(open_ends) - 1


def _round(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


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


def build_overlay(analysis: Analysis, samples: pl.DataFrame | None = None) -> Iterator[bytes]:
    """Yield the events of the overlay, each a JSON object: names of the tracks, then slices and counters, track by track.

    `samples`: table telemetry of the analysed device; what of it falls into the recorded steps becomes counters.
    """
    for event in _build_events(analysis, samples):
        yield msgspec.json.encode(event)


def _build_events(analysis: Analysis, samples: pl.DataFrame | None) -> Iterator[dict[str, Any]]:
    pid, base = _find_free_pid(analysis.trace), analysis.trace.meta.base_ns
    bounds = list(build_tracks(analysis))
    yield from _build_name_events(pid, bounds)
    fixed = ((_CRITICAL, _build_critical_slices(analysis)), (_IDLE, _build_idle_slices(analysis)), (_STEPS, _build_step_slices(analysis)))
    for track, rows in (*fixed, *((track.number, track.slices()) for track in bounds)):
        for start, end, name, args in rows:
            yield _build_slice(pid, track, name, base + start, end - start, args)
    yield from _build_depth_counter(analysis, pid, base)
    if samples is not None:
        yield from _build_sample_counters(analysis, samples, pid, base)


def format_trace_document(events: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `events` as a trace of their own."""
    between = b'{"traceEvents":[\n'
    for event in events:
        yield between + event
        between = b",\n"
    yield (between if between[0:1] == b"{" else b"") + b"\n]}\n"


def compress_gzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `pieces` compressed."""
    deflate = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW_BITS)
    for piece in pieces:
        yield deflate.compress(piece)
    yield deflate.flush()


def format_microseconds(ns: int) -> msgspec.Raw:
    """Return a time in ns as the JSON text of its microseconds, exactly."""
    whole, rest = divmod(abs(ns), 1000)
    return msgspec.Raw(f"{'-' if ns < 0 else ''}{whole}.{rest:03d}".encode())


def _find_free_pid(trace: Trace) -> int:
    """Return a process id that the recording does not use."""
    taken = {thread.pid for thread in trace.meta.threads}
    pid = _PID
    while str(pid) in taken:
        pid += 1
    return pid


def _build_name_events(pid: int, bounds: Iterable[Track]) -> Iterator[dict[str, Any]]:
    """Yield the metadata that names the process and its tracks, and puts them on top."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": "gpudiag"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": -1}}
    for track, name in (*_TRACKS.items(), *((track.number, track.name) for track in bounds)):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "ts": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": track, "ts": 0, "args": {"sort_index": track}}


def _build_slice(pid: int, track: int, name: str, start: int, length: int, args: dict[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in args.items() if value is not None}
    times = {"ts": format_microseconds(start), "dur": format_microseconds(length)}
    return {"ph": "X", "cat": CATEGORY, "name": name, "pid": pid, "tid": track, **times, "args": shown}


def _build_critical_slices(analysis: Analysis) -> Iterator[SliceRow]:
    """Yield the pieces of the critical path, named by what bounds them."""
    path = analysis.critical_path
    if path is None:
        return
    work = analysis.trace.kernels.select(pl.col("id").alias("kernel"), pl.col("name").cast(pl.String).alias("kernel_name"))
    named = _add_op_names(path, analysis.trace).join(work, on="kernel", how="left", maintain_order="left")
    for row in named.iter_rows(named=True):
        args = {"kind": row["kind"], "op": row["op_name"], "kernel": row["kernel_name"], "stream": row["stream"]}
        yield row["start_ns"], row["end_ns"], row["bound"], args


def _build_idle_slices(analysis: Analysis) -> Iterator[SliceRow]:
    """Yield the idle pieces of the device, named by their cause."""
    for row in _add_op_names(analysis.idle, analysis.trace).iter_rows(named=True):
        args = {"evidence": row["evidence"], "site": row["site"], "op": row["op_name"], "gap": row["kind"]}
        yield row["start_ns"], row["end_ns"], row["cause"].removeprefix("idle_"), args


def _build_step_slices(analysis: Analysis) -> Iterator[SliceRow]:
    for row in analysis.steps.iter_rows(named=True):
        yield row["start_ns"], row["end_ns"], row["name"], {"analysed": row["analysed"], "found by": analysis.steps_source}


def _add_op_names(frame: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """Return `frame` with the name of its op as op_name."""
    names = trace.ops.select(pl.col("id").alias("op"), pl.col("name").cast(pl.String).alias("op_name"))
    return frame.join(names, on="op", how="left", maintain_order="left")


def _build_depth_counter(analysis: Analysis, pid: int, base: int) -> Iterator[dict[str, Any]]:
    """Yield the depth of the launch queue over time as a counter."""
    if analysis.queue is None:
        return
    for moment, depth in zip(analysis.queue.t_ns, analysis.queue.depth, strict=True):
        yield _build_counter(pid, base + moment, "queue depth", "kernels", round(depth, 3))


def _build_sample_counters(analysis: Analysis, samples: pl.DataFrame, pid: int, base: int) -> Iterator[dict[str, Any]]:
    """Yield what was sampled from the first to the last recorded step; nothing where the trace has no Unix time."""
    zero, steps = analysis.trace.meta.unix_base_ns, analysis.steps
    if zero is None or not steps.height:
        return
    first, last = steps["start_ns"].min(), steps["end_ns"].max()
    within = samples.with_columns(at=pl.col("t_ns") - zero).filter(pl.col("at").is_between(first, last)).sort("at")
    for column, (name, unit, factor) in _COUNTERS.items():
        for moment, value in within.select("at", column).drop_nulls().iter_rows():
            yield _build_counter(pid, base + moment, name, unit, round(value * factor, 3))


def _build_counter(pid: int, at: int, name: str, unit: str, value: float) -> dict[str, Any]:
    """Return a value of a counter; its unit is the name of its series, and stands in its name too, which viewers show."""
    counter = {"ph": "C", "cat": CATEGORY, "name": f"{name} ({unit})", "pid": pid, "tid": 0}
    return {**counter, "ts": format_microseconds(at), "args": {unit: value}}


TableFormat = Literal["csv", "parquet"]

COLUMNS_TABLE = "columns"
"""Name of the file that explains the columns of all others."""

THREADS_TABLE = "threads"
"""Table of the host threads, which the schema of traces keeps as metadata."""

_EXPORTED: dict[str, tuple[Column, ...]] = {
    **TABLES,
    THREADS_TABLE: (
        Column("thread", pl.Int64(), "", "as the column `thread` of the other tables has it"),
        Column("pid", pl.String(), "", "process, as recorded"),
        Column("tid", pl.String(), "", "thread, as recorded"),
        Column("name", pl.String(), "", "name, as recorded; '' where none was"),
    ),
}

_SUFFIXES = {"share": "_share", "B": "_bytes", "FLOP": "_flop", "B/s": "_bytes_per_s", "%": "_pct"}
"""Unit -> what a column of it ends in; of other units it is their own name (`_ns`, `_mhz`, `_ranks`)."""
_TOLD_BY = {"B": "bytes", "FLOP": "flops", "samples": "samples", "elements": "elements"}
"""Unit -> what in a name tells it as well."""
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"
"""What a terminal would obey; tab and line feed stay, as quoted cells may hold them."""
_FORMULA = r"^([=+\-@\t\r])"
"""First characters that make a spreadsheet read a cell as a formula (owasp.org/www-community/attacks/CSV_Injection)."""


def name_exported_column(column: Column) -> str:
    """Return the name of a column in a file: that of the table, with its unit at the end where the name does not tell it."""
    if not column.unit:
        return column.name
    suffix = _SUFFIXES.get(column.unit, f"_{column.unit.lower()}")
    told = column.name.endswith(suffix) or _TOLD_BY.get(column.unit, suffix) in column.name
    return column.name if told else f"{column.name}{suffix}"


def build_threads_table(trace: Trace) -> pl.DataFrame:
    """Return the host threads of a trace, so that the numbers of threads in the other tables can be told."""
    rows = [(number, thread.pid, thread.tid, thread.name) for number, thread in enumerate(trace.meta.threads)]
    return pl.DataFrame(rows, schema={column.name: column.dtype for column in _EXPORTED[THREADS_TABLE]}, orient="row")


def add_units(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` with the columns that the schema of `table` knows, under the names that they have in a file."""
    known = {column.name: name_exported_column(column) for column in _EXPORTED[table] if column.name in frame.columns}
    return frame.select(pl.col(name).alias(told) for name, told in known.items())


def explain_columns(written: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    """Return one row for each column of the tables in `written`: file, column, its name in `gpudiag sql`, type, unit, meaning."""
    rows = [
        (table, name_exported_column(column), column.name, str(frame.schema[name_exported_column(column)]), column.unit, column.doc)
        for table, frame in written.items()
        for column in _EXPORTED[table]
        if name_exported_column(column) in frame.columns
    ]
    return pl.DataFrame(rows, schema=["table", "column", "sql_column", "type", "unit", "meaning"], orient="row")


def write_table(frame: pl.DataFrame, file: IO[bytes], form: TableFormat) -> None:
    """Write `frame` to `file`, as CSV in the form of `harmless`."""
    if form == "parquet":
        frame.write_parquet(file)
    else:
        sanitize_csv(frame).write_csv(file)


def sanitize_csv(frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` as CSV can hold it, and spreadsheets and terminals may show it.

    A text that a spreadsheet would run as a formula gets an apostrophe in front, control characters are left out, and what CSV has no form
    for (lists, durations) is JSON.
    """
    told = frame.with_columns(
        _encode_json(column) for column in frame.iter_columns() if (column.dtype.is_nested() or column.dtype in (pl.Duration, pl.Binary))
    )
    texts = [name for name, dtype in told.schema.items() if dtype in (pl.String, pl.Categorical)]
    shown = (pl.col(name).cast(pl.String).str.replace_all(_CONTROL, "").str.replace(_FORMULA, "'${1}") for name in texts)
    return told.with_columns(shown)


def _encode_json(column: pl.Series) -> pl.Series:
    texts = [None if value is None else msgspec.json.encode(value).decode().strip('"') for value in column.to_list()]
    return pl.Series(column.name, texts, dtype=pl.String)
