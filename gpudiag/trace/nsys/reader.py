"""An SQLite export of Nsight Systems -> the tables of stage 'read'."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl

from gpudiag.errors import InputError
from gpudiag.model import tables
from gpudiag.model.trace import Trace, TraceMeta
from gpudiag.trace.assemble import ordered
from gpudiag.trace.garbage import no_cycle_collection
from gpudiag.trace.nsys import activities, processes, ranges
from gpudiag.trace.nsys.database import EXPORT_AGAIN, Export, open_export
from gpudiag.trace.nsys.devices import devices
from gpudiag.trace.source import shown
from gpudiag.units import format_share

RECORD = "record with `nsys profile --trace=cuda,nvtx`"

_CONTENT = (*processes.WORK_TABLES, processes.CALLS, processes.RANGES)
_BESIDE = (
    "StringIds", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "PROFILER_OVERHEAD", "ThreadNames", "TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE",
    "TARGET_INFO_SESSION_START_TIME",
)  # fmt: skip

_MISSING = {
    processes.CALLS: "no CUDA calls were recorded: which call started which kernel, and what the host waited for, is not known",
    processes.RANGES: "no NVTX ranges were recorded: no op, step or phase is named",
}


def read(path: str | Path) -> Trace:
    """Return the tables of the export at `path`, of the process with most kernels.

    Tables and columns differ between versions of nsys: what is there is read. Raises InputError where the file cannot be used.
    """
    source = str(path)
    with open_export(source, (*_CONTENT, *_BESIDE)) as export, no_cycle_collection():
        _check(export, source)
        return _read(export, source)


def _check(export: Export, source: str) -> None:
    if "StringIds" not in export.columns or not any(table in export.columns for table in _CONTENT):
        message = f"{shown(source)} is an SQLite file, but no export of Nsight Systems with CUDA or NVTX events"
        raise InputError(message, f"{RECORD}; {EXPORT_AGAIN}")


def _read(export: Export, source: str) -> Trace:
    process, notes = processes.choose_process(export, source)
    dropped: dict[str, int] = {}
    found = ranges.read_ranges(export, process, dropped)
    marks = pl.concat([found.marks, activities.waits(export, process), ranges.overheads(export, process)])
    ops, signatures = _with_signatures(found.ops)
    parts = {
        "ops": activities.usable(ops, "NVTX ranges of ops", dropped),
        "launches": activities.usable(activities.calls(export, process), "CUDA calls", dropped),
        "kernels": activities.usable(activities.device_work(export, process), "device work", dropped),
        "marks": activities.usable(marks, "ranges", dropped),
    }
    base = _base(parts)
    if base is None:
        raise InputError(f"{shown(source)} holds no kernel, CUDA call or NVTX range", f"{RECORD}; {EXPORT_AGAIN}")
    known = {name: _table(name, frame, base) for name, frame in _with_threads(parts).items()}
    empty = {name: tables.empty(name) for name in ("frames", "allocations", "collectives")}
    meta = TraceMeta(
        source=source,
        events=sum(frame.height for frame in parts.values()) + sum(dropped.values()),
        base_ns=base,
        unix_base_ns=_unix_base(export, base),
        devices=devices(export, process),
        threads=processes.threads(_thread_ids(parts), processes.thread_names(export)),
        record_shapes=signatures.height > 0,
        dropped=dropped,
        uncompressed_bytes=os.path.getsize(source),
        warnings=(*notes, *_warnings(export, known["kernels"])),
        recorder="nsys",
    )
    return Trace(meta=meta, **known, signatures=ordered("signatures", signatures), **empty)


def _with_signatures(ops: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return `ops` with the row of their sizes, and the table of sizes."""
    distinct = ops.select(pl.col("sizes").drop_nulls().unique(maintain_order=True))
    rows = distinct.with_row_index("signature").with_columns(pl.col("signature").cast(pl.Int64))
    ops = ops.join(rows, on="sizes", how="left", maintain_order="left").drop("sizes")
    ops = ops.with_columns(pl.col("name").cast(pl.Categorical()), pl.lit(None, dtype=pl.Int64).alias("fwd_thread"))
    unknown = [pl.lit(None, dtype=pl.String).alias(name) for name in ("dtypes", "strides", "args")]
    return ops, distinct.select(pl.col("sizes").alias("shapes"), *unknown)


def _base(parts: dict[str, pl.DataFrame]) -> int | None:
    starts = [int(frame["start_ns"].min()) for frame in parts.values() if frame.height]  # type: ignore[arg-type]
    return min(starts, default=None)


def _thread_ids(parts: dict[str, pl.DataFrame]) -> pl.Series:
    """Return the threads (globalTid) of all host events in the order of their numbers."""
    ids: pl.Series = pl.concat([frame["globalTid"] for frame in parts.values() if "globalTid" in frame.columns])
    distinct: pl.Series = ids.drop_nulls().unique().sort()
    return distinct


def _with_threads(parts: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """Return `parts` with the row of each thread instead of its globalTid."""
    ids = pl.DataFrame({"globalTid": _thread_ids(parts)}).with_row_index("thread").with_columns(pl.col("thread").cast(pl.Int64))
    return {
        name: frame.join(ids, on="globalTid", how="left", maintain_order="left") if "globalTid" in frame.columns else frame
        for name, frame in parts.items()
    }


def _table(name: str, frame: pl.DataFrame, base: int) -> pl.DataFrame:
    schema = {column: dtype for column, dtype in tables.schema(name).items() if column != "id"}
    frame = frame.with_columns(pl.col("start_ns") - base, pl.col("end_ns") - base).with_columns(
        pl.col(column).cast(dtype) for column, dtype in schema.items() if frame.schema[column] != dtype
    )
    return ordered(name, frame)


def _unix_base(export: Export, base: int) -> int | None:
    """Return the Unix time of the trace's zero; event times count from the start of the session."""
    began = export.read("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])["utcEpochNs"].drop_nulls()
    return int(began[0]) + base if began.len() and began[0] > 0 else None


def _warnings(export: Export, kernels: pl.DataFrame) -> tuple[str, ...]:
    missing = [f"{words} ({RECORD})" for table, words in _MISSING.items() if table not in export.columns]
    whole = kernels.filter(pl.col("name").cast(pl.String) == activities.GRAPH_NAME)
    if whole.height:
        share = (whole["end_ns"] - whole["start_ns"]).sum() / max((kernels["end_ns"] - kernels["start_ns"]).sum(), 1)
        missing.append(
            f"{whole.height} CUDA graph launches were recorded as a whole, {format_share(share)} of the device time: their kernels are not "
            "known; record with `nsys profile --cuda-graph-trace=node`"
        )
    return tuple(missing)
