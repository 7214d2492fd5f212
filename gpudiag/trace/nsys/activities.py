"""Device work and CUDA calls of one process. Times are ns of the recording's clock, as exported."""

from __future__ import annotations

import polars as pl

from gpudiag.model import tables
from gpudiag.trace.nsys.database import Export
from gpudiag.trace.nsys.processes import CALLS, WORK_TABLES, of_process

KERNEL, GRAPH, COPY, SET = WORK_TABLES
SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"

GRAPH_NAME = "CUDA graph (recorded as a whole)"

_EVERY = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
_SIZES = {what: [f"{what}{axis}" for axis in "XYZ"] for what in ("grid", "block")}

_LATEST = 2**61
"""Times beyond this are no times (73 years)."""

# enum CUpti_ActivityMemcpyKind (cupti_activity.h); 11 to 13 are those of unified memory (ENUM_CUDA_MEMCPY_OPER of the export).
_DIRECTIONS = {
    0: "Unknown", 1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
    11: "UVM HtoD", 12: "UVM DtoH", 13: "UVM DtoD",
}  # fmt: skip

# The export's own numbers (ENUM_CUDA_MEM_KIND). CUPTI's (enum CUpti_ActivityMemoryKind) are one higher.
_MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static"}
_DEVICE_MEMORY = 2

# enum CUpti_ActivitySynchronizationType; the words are Kineto's.
_SYNCS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}

# nsys prints template arguments with their types: fill<(int)4, (bool)1>. The names that PyTorch's profiler records have none.
_CAST = r"\((?:unsigned |signed )?(?:int|long|short|char|long long)\)(-?\d)"
_TRUTH = {r"\(bool\)1": "true", r"\(bool\)0": "false"}

# Versions of the API that nsys appends: cudaMemcpyAsync_v3020, cudaLaunchKernel_ptsz_v7000. The driver's own _v2 stay.
_API_VERSION = r"(?:_pt[sd][sz])?_v\d{4,}$"


def device_work(export: Export, process: int | None) -> pl.DataFrame:
    """Return the kernels, copies, memsets and whole graphs of `process`, in no order, with the columns of table kernels but `id`."""
    parts = [_kernels(export), _copies(export), _memsets(export), _graphs(export)]
    return pl.concat([_common(of_process(frame, process, "globalPid")) for frame in parts])


def _common(frame: pl.DataFrame) -> pl.DataFrame:
    named = {"start": "start_ns", "end": "end_ns", "deviceId": "device", "streamId": "stream", "correlationId": "correlation"}
    frame = frame.rename(named)
    missing = [name for name in tables.schema("kernels") if name not in frame.columns and name != "id"]
    frame = frame.with_columns(pl.lit(None).alias(name) for name in missing)
    schema = {name: dtype for name, dtype in tables.schema("kernels").items() if name != "id"}
    return frame.select(pl.col(name).cast(dtype) for name, dtype in schema.items())


def _kernels(export: Export) -> pl.DataFrame:
    named = "demangledName" if "demangledName" in export.columns.get(KERNEL, frozenset()) else "shortName"
    frame = export.read(KERNEL, [*_EVERY, named, "graphNodeId"], products=_SIZES)
    names = export.strings(KERNEL, named).with_columns(_plain_template(pl.col("value")).alias("name"))
    frame = frame.join(names, left_on=named, right_on="id", how="left", maintain_order="left")
    sizes = [pl.when(pl.col(what) > 0).then(what).alias(what) for what in _SIZES]
    return frame.with_columns(pl.col("name").fill_null(""), pl.lit("kernel").alias("kind"), *sizes, _node())


def _plain_template(name: pl.Expr) -> pl.Expr:
    name = name.str.replace_all(_CAST, "${1}")
    for cast, word in _TRUTH.items():
        name = name.str.replace_all(cast, word)
    return name


def _node() -> pl.Expr:
    """Return the graph node; 0 and null stand for work outside of graphs."""
    return pl.when(pl.col("graphNodeId") != 0).then("graphNodeId").alias("graph_node")


def _copies(export: Export) -> pl.DataFrame:
    frame = export.read(COPY, [*_EVERY, "bytes", "copyKind", "srcKind", "dstKind", "graphNodeId"])
    direction = pl.col("copyKind").replace_strict(_DIRECTIONS, default="Unknown", return_dtype=pl.String)
    words = _memory_words(_device_ends(frame))
    source, target = (pl.col(end).replace_strict(words, default="Unknown", return_dtype=pl.String) for end in ("srcKind", "dstKind"))
    name = pl.format("Memcpy {} ({} -> {})", direction, source, target)
    return frame.with_columns(name.alias("name"), pl.lit("memcpy").alias("kind"), _not_negative("bytes"), _node())


def _device_ends(copies: pl.DataFrame) -> pl.Series:
    """Return the kind of memory at the device's end of each copy from and to the host."""
    ends = pl.when(pl.col("copyKind") == 1).then("dstKind").when(pl.col("copyKind") == 2).then("srcKind")
    found: pl.Series = copies.select(ends.alias("kind"))["kind"].drop_nulls()
    return found


def _memory_words(kinds: pl.Series) -> dict[int, str]:
    """Return the words for kinds of memory, by the numbers that memory of the device has in this file."""
    above = 1 if kinds.len() and (kinds == _DEVICE_MEMORY + 1).mean() > 0.5 else 0  # type: ignore[operator]
    return {number + above: word for number, word in _MEMORY.items()}


def _memsets(export: Export) -> pl.DataFrame:
    frame = export.read(SET, [*_EVERY, "bytes", "memKind", "graphNodeId"])
    ends = _device_ends(export.read(COPY, ["copyKind", "srcKind", "dstKind"]))
    words = _memory_words(ends if ends.len() else frame["memKind"].drop_nulls())  # without copies: memsets are of the device's memory
    kind = pl.col("memKind").replace_strict(words, default="Unknown", return_dtype=pl.String)
    return frame.with_columns(pl.format("Memset ({})", kind).alias("name"), pl.lit("memset").alias("kind"), _not_negative("bytes"), _node())


def _not_negative(column: str) -> pl.Expr:
    return pl.when(pl.col(column) >= 0).then(column).alias(column)


def _graphs(export: Export) -> pl.DataFrame:
    """Return the graph launches that were recorded as one piece of work each (--cuda-graph-trace=graph, nsys' default)."""
    return export.read(GRAPH, _EVERY).with_columns(pl.lit(GRAPH_NAME).alias("name"), pl.lit("kernel").alias("kind"))


def calls(export: Export, process: int | None) -> pl.DataFrame:
    """Return the CUDA runtime and driver calls of `process` (globalTid, api, start_ns, end_ns, correlation, kernel), in no order."""
    frame = of_process(export.read(CALLS, ["start", "end", "globalTid", "correlationId", "nameId"]), process)
    names = export.strings(CALLS, "nameId").with_columns(pl.col("value").str.replace(_API_VERSION, ""))
    frame = frame.join(names, left_on="nameId", right_on="id", how="left", maintain_order="left")
    return frame.select(
        "globalTid",
        pl.col("value").fill_null("").cast(pl.Categorical()).alias("api"),
        pl.col("start").alias("start_ns"),
        pl.col("end").alias("end_ns"),
        pl.col("correlationId").alias("correlation"),
        pl.lit(None, dtype=pl.Categorical()).alias("kernel"),
    )


def waits(export: Export, process: int | None) -> pl.DataFrame:
    """Return CUPTI's records of synchronisation as marks (globalTid null: they name a stream, no thread)."""
    frame = of_process(export.read(SYNC, ["start", "end", "globalPid", "syncType"]), process, "globalPid")
    return frame.select(
        pl.lit(None, dtype=pl.Int64).alias("globalTid"),
        pl.col("syncType").replace_strict(_SYNCS, default="Synchronization", return_dtype=pl.String).alias("name"),
        pl.lit("sync").alias("category"),
        pl.col("start").alias("start_ns"),
        pl.col("end").alias("end_ns"),
    )


def usable(frame: pl.DataFrame, what: str, dropped: dict[str, int]) -> pl.DataFrame:
    """Return the rows with a start and an end after it; the others are counted in `dropped`."""
    timed = pl.col("start_ns").is_between(-_LATEST, _LATEST) & pl.col("end_ns").is_between(-_LATEST, _LATEST)
    kept = frame.filter((timed & (pl.col("end_ns") >= pl.col("start_ns"))).fill_null(False))
    if kept.height < frame.height:
        dropped[f"{what} without a usable start and end"] = frame.height - kept.height
    return kept
