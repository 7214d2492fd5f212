"""Exports: the Perfetto overlay, and tables as CSV or Parquet with units in their names.

Slices: longest path, idle causes, steps, and the work of each stream or thread by its bound. Counters: depth of the launch queue, and what
was sampled of the device meanwhile.

Format: Trace Event Format (Google, "Trace Event Format", 2016): complete events X, metadata M, counters C; times are microseconds of the
recording's own clock, written as decimal text, so that no nanosecond is lost.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import polars as pl
from msgspec.json import encode

from gpudiag.arrays import Ints
from gpudiag.model.analysis import Analysis
from gpudiag.model.trace import TABLES, Column, Trace
from gpudiag.report.console import clean
from gpudiag.report.files import write_file_with

SliceRow = tuple[int, int, str, dict[str, Any]]
"""Start and end in ns from the trace's base, name, arguments."""

FIRST_TRACK = 10
"""Number of the first of these tracks; those below are the overlay's fixed ones."""

_LONGEST = 60


class Track(NamedTuple):
    """One line of the time line."""

    number: int
    name: str
    rows: pl.DataFrame

    def slices(self) -> Iterator[SliceRow]:
        """Yield its pieces by start, each named by its bound."""
        for row in self.rows.iter_rows(named=True):
            efficiency, roof_ns = row["efficiency"], row["t_roof_ns"]
            args = {
                "op": row["op_name"],
                "work": row["name"],
                "efficiency_share": None if efficiency is None else round(efficiency, 4),
                "roofline_time_ns": None if roof_ns is None else round(roof_ns, 1),
                "flop": row["flops"],
                "moved_bytes": row["bytes_moved"],
                "cost": row["provenance"],
            }
            yield row["start_ns"], row["end_ns"], row["bound"] or "unknown", args


def build_tracks(analysis: Analysis) -> Iterator[Track]:
    """Yield the tracks of the work of the analysed device, in the order of streams or threads."""
    trace, on_cpu, number = analysis.trace, analysis.device_index is None, FIRST_TRACK
    # The work with the name of its op and its line: the stream, for work of a CPU the thread
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
    rows = trace.kernels.select(wanted).with_columns(pl.col("name").cast(pl.String)).join(ops, on="op", how="left", maintain_order="left")
    rows = rows.with_columns(line=pl.when(pl.col("kind") == "cpu").then(pl.col("thread")).otherwise(pl.col("stream")))
    for (line,), group in rows.sort("line", maintain_order=True, nulls_last=True).group_by("line", maintain_order=True):
        if not isinstance(line, int):
            name = "thread not known" if on_cpu else "stream not known"
        elif on_cpu:
            thread = trace.meta.threads[line] if 0 <= line < len(trace.meta.threads) else None
            name = f"thread {clean(thread.name or thread.tid, _LONGEST) if thread else line}"
        else:
            name = f"stream {line}"
        group = group.sort("start_ns", -pl.col("end_ns"))
        lanes = assign_lanes(group["start_ns"].to_numpy(), group["end_ns"].to_numpy())
        for lane in range(int(lanes.max(initial=0)) + 1):
            yield Track(number, f"bound: {name}{f' ({lane + 1})' if lane else ''}", group.filter(pl.Series(lanes == lane)))
            number += 1


def assign_lanes(starts: Ints, ends: Ints) -> Ints:
    """Return a lane for each piece, so that two pieces of one lane are apart or one holds the other, as viewers draw them.

    The pieces come by start, of those that start together the longest first. The first lane that takes a piece gets it.
    """
    found = np.zeros(len(starts), dtype=np.int64)
    if len(starts) < 2 or bool((starts[1:] >= ends[:-1]).all()):
        return found
    lanes: list[list[int]] = []  # of each lane the ends of the pieces that are open, inner last
    for place, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        for number, open_ends in enumerate(lanes):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if not open_ends or end <= open_ends[-1]:
                open_ends.append(end)
                found[place] = number
                break
        else:
            found[place] = len(lanes)
            lanes.append([end])
    return found


CATEGORY = "gpudiag"
"""Category of our events: the reader ignores it, so that an exported trace is read like the original."""

_TRACKS = {1: "critical path", 2: "idle: cause", 3: "steps"}
_CRITICAL, _IDLE, _STEPS = _TRACKS
_GZIP_WINDOW_BITS = 31  # zlib manual, deflateInit2: 15 bits of window + 16 for a gzip header


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
    base = analysis.trace.meta.base_ns
    taken = {thread.pid for thread in analysis.trace.meta.threads}
    # Process id to begin with: far above the ids that systems give (at most 4,194,304 on Linux)
    pid = next(pid for pid in count(67_707_564) if str(pid) not in taken)
    bounds = list(build_tracks(analysis))
    # Metadata that names the process and its tracks, and puts them on top
    names: list[tuple[int, str, dict[str, Any]]] = [(0, "process_name", {"name": "gpudiag"}), (0, "process_sort_index", {"sort_index": -1})]
    for track, name in (*_TRACKS.items(), *((track.number, track.name) for track in bounds)):
        names += [(track, "thread_name", {"name": name}), (track, "thread_sort_index", {"sort_index": track})]
    for track, kind, args in names:
        yield encode({"ph": "M", "name": kind, "pid": pid, "tid": track, "ts": 0, "args": args})
    for track, rows in (*_build_fixed_tracks(analysis), *((track.number, track.slices()) for track in bounds)):
        for start, end, name, args in rows:
            shown = {key: value for key, value in args.items() if value is not None}
            times = {"ts": format_microseconds(base + start), "dur": format_microseconds(end - start)}
            yield encode({"ph": "X", "cat": CATEGORY, "name": name, "pid": pid, "tid": track, **times, "args": shown})
    for moment, name, unit, value in _build_counters(analysis, samples):
        # The unit is the name of the series, and stands in the counter's name too, which viewers show
        counter = {"ph": "C", "cat": CATEGORY, "name": f"{name} ({unit})", "pid": pid, "tid": 0}
        yield encode({**counter, "ts": format_microseconds(base + moment), "args": {unit: value}})


def format_trace_document(events: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `events` as a trace of their own."""
    between = b'{"traceEvents":[\n'
    for event in events:
        yield between + event
        between = b",\n"
    yield (between if between[0:1] == b"{" else b"") + b"\n]}\n"


def compress_gzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `pieces` compressed."""
    deflate = zlib.compressobj(6, zlib.DEFLATED, _GZIP_WINDOW_BITS)
    for piece in pieces:
        yield deflate.compress(piece)
    yield deflate.flush()


def format_microseconds(ns: int) -> msgspec.Raw:
    """Return a time in ns as the JSON text of its microseconds, exactly."""
    whole, rest = divmod(abs(ns), 1000)
    return msgspec.Raw(f"{'-' if ns < 0 else ''}{whole}.{rest:03d}".encode())


def _build_fixed_tracks(analysis: Analysis) -> Iterator[tuple[int, Iterator[SliceRow]]]:
    ops = analysis.trace.ops.select(pl.col("id").alias("op"), pl.col("name").cast(pl.String).alias("op_name"))
    if (path := analysis.critical_path) is not None:
        work = analysis.trace.kernels.select(pl.col("id").alias("kernel"), pl.col("name").cast(pl.String).alias("kernel_name"))
        path = path.join(ops, on="op", how="left", maintain_order="left").join(work, on="kernel", how="left", maintain_order="left")
        yield _CRITICAL, _cut_slices(path, "bound", {"kind": "kind", "op": "op_name", "kernel": "kernel_name", "stream": "stream"})
    idle = analysis.idle.join(ops, on="op", how="left", maintain_order="left")
    idle = idle.with_columns(pl.col("cause").cast(pl.String).str.strip_prefix("idle_"))
    yield _IDLE, _cut_slices(idle, "cause", {"evidence": "evidence", "site": "site", "op": "op_name", "gap": "kind"})
    steps = analysis.steps.with_columns(source=pl.lit(analysis.steps_source))
    yield _STEPS, _cut_slices(steps, "name", {"analysed": "analysed", "found by": "source"})


def _cut_slices(frame: pl.DataFrame, name: str, columns: dict[str, str]) -> Iterator[SliceRow]:
    for row in frame.iter_rows(named=True):
        yield row["start_ns"], row["end_ns"], row[name], {key: row[column] for key, column in columns.items()}


def _build_counters(analysis: Analysis, samples: pl.DataFrame | None) -> Iterator[tuple[int, str, str, float]]:
    if analysis.queue is not None:
        for moment, depth in zip(analysis.queue.t_ns, analysis.queue.depth, strict=True):
            yield moment, "queue depth", "kernels", round(depth, 3)
    zero, steps = analysis.trace.meta.unix_base_ns, analysis.steps
    if samples is None or zero is None or not steps.height:
        return
    first, last = steps["start_ns"].min(), steps["end_ns"].max()
    within = samples.with_columns(at=pl.col("t_ns") - zero).filter(pl.col("at").is_between(first, last)).sort("at")
    for column, (name, unit, factor) in _COUNTERS.items():
        for moment, value in within.select("at", column).drop_nulls().iter_rows():
            yield moment, name, unit, round(value * factor, 3)


TableFormat = Literal["csv", "parquet"]

COLUMNS_TABLE = "columns"

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


def write_table(target: Path, frame: pl.DataFrame, form: TableFormat) -> Path:
    """Write the whole of `frame` to `target` or nothing, as CSV in the form of `sanitize_csv`; return `target`."""
    write_file_with(target, lambda file: frame.write_parquet(file) if form == "parquet" else sanitize_csv(frame).write_csv(file))
    return target


def sanitize_csv(frame: pl.DataFrame) -> pl.DataFrame:
    """Return `frame` as CSV can hold it, and spreadsheets and terminals may show it.

    A text that a spreadsheet would run as a formula gets an apostrophe in front, control characters are left out, and what CSV has no form
    for (lists, durations) is JSON.
    """
    encoded = []
    for column in frame.iter_columns():
        if column.dtype.is_nested() or column.dtype in (pl.Duration, pl.Binary):
            values = [None if value is None else encode(value).decode().strip('"') for value in column.to_list()]
            encoded.append(pl.Series(column.name, values, dtype=pl.String))
    told = frame.with_columns(encoded)
    texts = [name for name, dtype in told.schema.items() if dtype in (pl.String, pl.Categorical)]
    shown = (pl.col(name).cast(pl.String).str.replace_all(_CONTROL, "").str.replace(_FORMULA, "'${1}") for name in texts)
    return told.with_columns(shown)
