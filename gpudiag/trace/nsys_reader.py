"""An export of Nsight Systems -> the tables of stage 'read'. Names and enumerations are those of NVIDIA's export schema reference.

torch.autograd.profiler.emit_nvtx gives each op a range 'aten::mm, seq = 12, op_id = 7, sizes = [[8, 8], [8, 8]], input_op_ids = [...]',
every part but the name optional (torch/csrc/profiler/util.cpp, getNvtxStr). Sizes are those of tensors, lists of tensors flattened; types
are not recorded.

What the threads that call CUDA did in the operating system stands in calls (OSRT_API) and sampled call chains. Calls have a chain from 80
us on (`--osrt-backtrace-threshold`), samples one at each (1 kHz). A chain tells what a call was for where the symbols of Python were found:
CPython's function slot_tp_iternext (Objects/typeobject.c) runs the `__next__` of a class that is written in Python, as torch's DataLoader
is; libraries that decode pictures, films and sound have files of their own.

Tested with exports of versions 2023.4 to 2026.2 (schemas 3.x to 3.25) and with generated files (tests/nsysfile.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl

from gpudiag.errors import InputError
from gpudiag.model import trace
from gpudiag.model.notices import NoticeCode, make_notice
from gpudiag.model.trace import Trace, TraceMeta
from gpudiag.trace import nsys_export
from gpudiag.trace.decompression import format_path
from gpudiag.trace.events import BACKEND_CALLS, GRAPH_CALL
from gpudiag.trace.kernel_names import DECODING, IN_NEXT
from gpudiag.trace.nsys_export import CALL_TABLE, EXPORT_AGAIN, RANGE_TABLE, WORK_TABLES, Export, filter_process, open_export, read_devices
from gpudiag.trace.table_store import order_table, pause_cycle_collection

KERNEL_TABLE, GRAPH_TABLE, COPY_TABLE, MEMSET_TABLE = WORK_TABLES
SYNC_TABLE = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"

GRAPH_NAME = "CUDA graph (recorded as a whole)"

_EVERY = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
_GEOMETRY_COLUMNS = {what: [f"{what}{axis}" for axis in "XYZ"] for what in ("grid", "block")}

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


def read_device_work(export: Export, process: int | None) -> pl.DataFrame:
    """Return the kernels, copies, memsets and whole graphs of `process`, in no order, with the columns of table kernels but `id`."""
    kind, in_graph = pl.lit("kernel").alias("kind"), pl.when(pl.col("graphNodeId") != 0).then("graphNodeId").alias("graph_node")
    positive = pl.when(pl.col("bytes") >= 0).then("bytes").alias("bytes")
    # kernels
    named = "demangledName" if "demangledName" in export.columns.get(KERNEL_TABLE, frozenset()) else "shortName"
    kernels = export.read(KERNEL_TABLE, [*_EVERY, named, "graphNodeId"], products=_GEOMETRY_COLUMNS)
    name = pl.col("value").str.replace_all(_CAST, "${1}")
    for cast, word in _TRUTH.items():
        name = name.str.replace_all(cast, word)
    names = export.strings(KERNEL_TABLE, named).with_columns(name.alias("name"))
    kernels = kernels.join(names, left_on=named, right_on="id", how="left", maintain_order="left")
    sizes = [pl.when(pl.col(what) > 0).then(what).alias(what) for what in _GEOMETRY_COLUMNS]
    kernels = kernels.with_columns(pl.col("name").fill_null(""), kind, *sizes, in_graph)
    # copies
    copies = export.read(COPY_TABLE, [*_EVERY, "bytes", "copyKind", "srcKind", "dstKind", "graphNodeId"])
    direction = pl.col("copyKind").replace_strict(_DIRECTIONS, default="Unknown", return_dtype=pl.String)
    words = _format_memory_kinds(copies)
    ends = (pl.col(end).replace_strict(words, default="Unknown", return_dtype=pl.String) for end in ("srcKind", "dstKind"))
    name = pl.format("Memcpy {} ({} -> {})", direction, *ends).alias("name")
    ways = copies.select("copyKind", "srcKind", "dstKind")
    copies = copies.with_columns(name, pl.lit("memcpy").alias("kind"), positive, in_graph)
    # memsets; without copies to tell the numbers: they are of the device's memory
    memsets = export.read(MEMSET_TABLE, [*_EVERY, "bytes", "memKind", "graphNodeId"])
    words = _format_memory_kinds(ways, memsets["memKind"].drop_nulls())
    name = pl.format("Memset ({})", pl.col("memKind").replace_strict(words, default="Unknown", return_dtype=pl.String)).alias("name")
    memsets = memsets.with_columns(name, pl.lit("memset").alias("kind"), positive, in_graph)
    graphs = export.read(GRAPH_TABLE, _EVERY).with_columns(pl.lit(GRAPH_NAME).alias("name"), kind)
    renamed = {"deviceId": "device", "streamId": "stream", "correlationId": "correlation"}
    schema = {column: dtype for column, dtype in trace.build_table_schema("kernels").items() if column != "id"}
    parts = []
    for part in (kernels, copies, memsets, graphs):
        frame = filter_process(part, process, "globalPid").rename(renamed)
        frame = frame.with_columns(pl.lit(None).alias(column) for column in schema if column not in frame.columns)
        parts.append(frame.select(pl.col(column).cast(dtype) for column, dtype in schema.items()))
    return pl.concat(parts)


def _format_memory_kinds(copies: pl.DataFrame, otherwise: pl.Series | None = None) -> dict[int, str]:
    """Return the words for kinds of memory, by the numbers that memory of the device has in this file.

    Those at the device's end of `copies` from and to the host; without such `otherwise`.
    """
    ends = pl.when(pl.col("copyKind") == 1).then("dstKind").when(pl.col("copyKind") == 2).then("srcKind")
    kinds = copies.select(ends.alias("kind"))["kind"].drop_nulls()
    kinds = kinds if kinds.len() or otherwise is None else otherwise
    above = 1 if kinds.len() and (kinds == _DEVICE_MEMORY + 1).mean() > 0.5 else 0  # type: ignore[operator]
    return {number + above: word for number, word in _MEMORY.items()}


def read_calls(export: Export, process: int | None) -> pl.DataFrame:
    """Return the CUDA runtime and driver calls of `process` (globalTid, api, start_ns, end_ns, correlation, kernel), in no order."""
    frame = filter_process(export.read(CALL_TABLE, ["start", "end", "globalTid", "correlationId", "nameId"]), process)
    names = export.strings(CALL_TABLE, "nameId").with_columns(pl.col("value").str.replace(_API_VERSION, ""))
    frame = frame.join(names, left_on="nameId", right_on="id", how="left", maintain_order="left")
    return frame.select(
        "globalTid",
        pl.col("value").fill_null("").cast(pl.Categorical()).alias("api"),
        "start_ns",
        "end_ns",
        pl.col("correlationId").alias("correlation"),
        pl.lit(None, dtype=pl.Categorical()).alias("kernel"),
    )


def read_sync_marks(export: Export, process: int | None) -> pl.DataFrame:
    """Return CUPTI's records of synchronisation as marks (globalTid null: they name a stream, no thread)."""
    frame = filter_process(export.read(SYNC_TABLE, ["start", "end", "globalPid", "syncType"]), process, "globalPid")
    return frame.select(
        pl.lit(None, dtype=pl.Int64).alias("globalTid"),
        pl.col("syncType").replace_strict(_SYNCS, default="Synchronization", return_dtype=pl.String).alias("name"),
        pl.lit("sync").alias("category"),
        "start_ns",
        "end_ns",
    )


_TIMED = pl.col("start_ns").is_between(-_LATEST, _LATEST) & pl.col("end_ns").is_between(-_LATEST, _LATEST)
_UNUSABLE = ~(_TIMED & (pl.col("end_ns") >= pl.col("start_ns"))).fill_null(False)

# ENUM_NSYS_EVENT_TYPE of the export
_PUSH_POP, _START_END, _DOMAIN = 59, 60, 75

OWN_DOMAIN = "gpudiag"
_OWN_STEP = r"^step (\d{1,18})$"
_LIBRARIES = ("NCCL", "CCCL", "NVSHMEM", "cuBLAS", "cuDNN", "cuFFT", "cuSPARSE", "cuSOLVER", "TensorRT", "libcudf", "libkvikio")
"""Domains of libraries, whose ranges lie around single calls and are no part of the user's program."""

_SUFFIX = r", (?:(?:stashed )?seq|op_id|sizes|input_op_ids) ?= ?"
_SEQUENCE = r", (?:stashed )?seq ?= ?(\d{1,18})"
_SIZES = r", sizes ?= ?(\[[\[\]\d, -]*\])"
_OPERATOR = r"^(?:[a-z_]\w*::[A-Za-z_]|autograd::engine::)|Backward\d*$"
"""Names of ops without numbers or sizes: qualified by a namespace, as torch's operators are, or autograd nodes."""
_CALLS = "|".join(rf"^{text}" for text in (*BACKEND_CALLS, GRAPH_CALL))


def read_ranges(export: Export, process: int | None, dropped: dict[str, int]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the NVTX ranges of `process` as (ops with `sizes` as text, annotations), in no order.

    Those of libraries and those that never ended are counted in `dropped`.
    """
    events = export.read(RANGE_TABLE, ["start", "end", "eventType", "globalTid", "domainId", "textId"], ["text"])
    # the text stands in a column of its own or, where it was registered, in StringIds
    strings = export.strings(RANGE_TABLE, "textId")
    events = events.join(strings, left_on="textId", right_on="id", how="left", maintain_order="left")
    events = events.with_columns(
        pl.coalesce("text", "value", pl.lit("")).alias("text"),
        pl.col("domainId").fill_null(0),
    )
    events = filter_process(events, process)
    ranges = events.filter(pl.col("eventType").is_in([_PUSH_POP, _START_END]))
    # (domainId, domain) of the domains that have a name; the default one has none
    made = events.filter((pl.col("eventType") == _DOMAIN) & (pl.col("domainId") != 0))
    ranges = ranges.join(
        made.select("domainId", pl.col("text").alias("domain")).unique("domainId", keep="first", maintain_order=True),
        on="domainId",
        how="left",
        maintain_order="left",
    ).with_columns(pl.col("domain").fill_null(""))
    ranges = _drop_counted(ranges, pl.col("domain").is_in(_LIBRARIES), "NVTX ranges of libraries", dropped)
    open_ = pl.col("end_ns").is_null() | ((pl.col("end_ns") == 0) & (pl.col("start_ns") > 0))  # 0: older exports have no nulls
    ranges = _drop_counted(ranges, open_, "NVTX ranges that were not ended", dropped)
    # What each distinct text says: name, sequence, sizes, and whether torch wrote it for an op
    text = pl.col("text")
    found = pl.DataFrame({"text": ranges["text"].unique()}).with_columns(
        name=text.str.replace(f"{_SUFFIX}.*$", ""),
        sequence=text.str.extract(_SEQUENCE).cast(pl.Int64, strict=False),
        sizes=text.str.extract(_SIZES),
    )
    named = pl.col("name").str.contains(_OPERATOR) | pl.col("name").str.contains(_CALLS)
    told = found.with_columns(op=pl.col("sequence").is_not_null() | pl.col("sizes").is_not_null() | named)
    ranges = ranges.join(told, on="text", how="left", maintain_order="left")
    is_op = (pl.col("eventType") == _PUSH_POP) & (pl.col("domain") == "") & pl.col("op")
    ops = ranges.filter(is_op).select("globalTid", "name", "start_ns", "end_ns", "sequence", "sizes")
    # the others are annotations; 'step 12' of our own domain gets the name of the profiler's step marks, as the firmest sign of steps
    own = (pl.col("domain") == OWN_DOMAIN) & pl.col("name").str.contains(_OWN_STEP)
    name = pl.when(own).then(pl.col("name").str.replace(_OWN_STEP, "ProfilerStep#${1}")).otherwise("name").alias("name")
    marks = ranges.filter(~is_op).select("globalTid", name, pl.lit("annotation").alias("category"), "start_ns", "end_ns")
    return ops, marks


def _drop_counted(ranges: pl.DataFrame, unwanted: pl.Expr, what: str, dropped: dict[str, int]) -> pl.DataFrame:
    kept = ranges.filter(~unwanted)
    if kept.height < ranges.height:
        dropped[what] = ranges.height - kept.height
    return kept


OVERHEAD_TABLES = ("PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD")
"""Of nsys and, since schema 3.25, of the driver: code that is loaded or compiled at its first use."""


def read_overheads(export: Export, process: int | None) -> pl.DataFrame:
    """Return the time that the profiler and the driver took on the threads of `process`, as marks."""
    parts = []
    for table in OVERHEAD_TABLES:
        frame = filter_process(export.read(table, ["start", "end", "globalTid", "nameId"]), process)
        strings = export.strings(table, "nameId").rename({"id": "nameId", "value": "name"})
        parts.append(frame.join(strings, on="nameId", how="left", maintain_order="left"))
    return pl.concat(parts).select(
        "globalTid",
        pl.col("name").fill_null("Nsight Systems overhead"),
        pl.lit("overhead").alias("category"),
        "start_ns",
        "end_ns",
    )


CALLS, CALL_CHAINS = "OSRT_API", "OSRT_CALLCHAINS"
SAMPLES, SAMPLE_CHAINS = "COMPOSITE_EVENTS", "SAMPLING_CALLCHAINS"
OS_TABLES = (CALLS, CALL_CHAINS, SAMPLES, SAMPLE_CHAINS)

LEAST_NS = 10_000
"""Shorter calls are left out: signals to other threads, by the hundred thousand."""

SAMPLED = "sample"
"""What a sample is called among the calls; it takes no time."""

_NEXT = r"^slot_tp_iternext$"
_DECODERS = (
    r"(?:^|[/\\])(?:_imaging(?:ft)?\.|cv2[./]|lib(?:turbo)?jpeg|libpng|libtiff|libwebp|libopenjp2|libav(?:codec|format)|libsndfile|libdecord"
    r"|libtorchcodec|libnvjpeg|torchvision[/\\]image)"
)


def read_os_calls(export: Export, process: int | None, cuda: pl.DataFrame) -> pl.DataFrame:
    """Return the calls and told samples as marks, in no order: 'poll', 'poll in __next__', 'sample in a decoder'.

    Those of the threads that make the CUDA calls `cuda`, from the first of these to the last.
    """
    threads = cuda["globalTid"].drop_nulls().unique()
    first, last = pl.lit(cuda["start_ns"].min(), dtype=pl.Int64), pl.lit(cuda["end_ns"].max(), dtype=pl.Int64)
    long = f"[end] - [start] >= {LEAST_NS}" if {"start", "end"} <= export.columns.get(CALLS, frozenset()) else ""
    calls = filter_process(export.read(CALLS, ["start", "end", "globalTid", "nameId", "callchainId"], where=long), process)
    calls = calls.filter(pl.col("globalTid").is_in(threads.implode()))
    names = export.strings(CALLS, "nameId").rename({"id": "nameId", "value": "api"})
    calls = calls.join(names, on="nameId", how="inner").join(_read_chains(export, CALL_CHAINS), on="callchainId", how="left")
    samples = filter_process(export.read(SAMPLES, ["id", "start", "globalTid"]), process).rename({"id": "callchainId"})
    samples = samples.filter(pl.col("globalTid").is_in(threads.implode())).join(_read_chains(export, SAMPLE_CHAINS), on="callchainId")
    samples = samples.with_columns(end_ns="start_ns", api=pl.lit(SAMPLED))
    columns = ["globalTid", "api", "told", "start_ns", "end_ns"]
    found = pl.concat([calls.select(columns), samples.select(columns)]).filter((pl.col("end_ns") > first) & (pl.col("start_ns") < last))
    return found.select(
        "globalTid",
        pl.concat_str("api", "told", separator=" ", ignore_nulls=True).alias("name"),
        pl.lit("os").alias("category"),
        "start_ns",
        "end_ns",
    )


def _read_chains(export: Export, table: str) -> pl.DataFrame:
    """Return (callchainId, told) of the chains that tell something."""
    found = [pl.DataFrame(schema={"callchainId": pl.Int64, "told": pl.String})]
    for column, pattern, told in (("symbol", _NEXT, IN_NEXT), ("module", _DECODERS, DECODING)):
        known = export.strings(table, column).filter(pl.col("value").str.contains(pattern))["id"]
        if known.len():
            chains = export.read(table, ["id"], where=f"[{column}] IN ({', '.join(map(str, known.to_list()))})")
            found.append(chains.select(callchainId="id", told=pl.lit(told)))
    return pl.concat(found).drop_nulls().unique("callchainId", keep="first", maintain_order=True)


NSYS_RECORD_HINT = "record with `nsys profile --trace=cuda,nvtx`"

_CONTENT = (*nsys_export.WORK_TABLES, nsys_export.CALL_TABLE, nsys_export.RANGE_TABLE)
_BESIDE = (
    "StringIds", SYNC_TABLE, "ThreadNames", *nsys_export.GPU_TABLES, "TARGET_INFO_CUDA_DEVICE", *OVERHEAD_TABLES,
    "TARGET_INFO_SESSION_START_TIME", *OS_TABLES,
)  # fmt: skip

_MISSING = {nsys_export.CALL_TABLE: NoticeCode.NSYS_NO_CALLS, nsys_export.RANGE_TABLE: NoticeCode.NSYS_NO_RANGES}


def read_nsys(path: str | Path) -> Trace:
    """Return the tables of the export at `path`, of the process with most kernels.

    Tables and columns differ between versions of nsys: what is there is read. Raises InputError where the file cannot be used.
    """
    source = str(path)
    with open_export(source, (*_CONTENT, *_BESIDE)) as export, pause_cycle_collection():
        if "StringIds" not in export.columns or not any(table in export.columns for table in _CONTENT):
            message = f"{format_path(source)} is an SQLite file, but no export of Nsight Systems with CUDA or NVTX events"
            raise InputError(message, f"{NSYS_RECORD_HINT}; {EXPORT_AGAIN}")
        return _read_export(export, source)


def _read_export(export: Export, source: str) -> Trace:
    process, notes = nsys_export.choose_process(export, source)
    dropped: dict[str, int] = {}
    ranges, annotations = read_ranges(export, process, dropped)
    calls = read_calls(export, process)
    marks = [annotations, read_sync_marks(export, process), read_overheads(export, process), read_os_calls(export, process, calls)]
    ops, signatures = _add_signatures(ranges)
    read = (
        ("ops", ops, "NVTX ranges of ops"),
        ("launches", calls, "CUDA calls"),
        ("kernels", read_device_work(export, process), "device work"),
        ("marks", pl.concat(marks), "ranges"),
    )
    parts = {name: _drop_counted(frame, _UNUSABLE, f"{what} without a usable start and end", dropped) for name, frame, what in read}
    starts = [int(frame["start_ns"].min()) for frame in parts.values() if frame.height]  # type: ignore[arg-type]
    base = min(starts, default=None)
    if base is None:
        raise InputError(f"{format_path(source)} holds no kernel, CUDA call or NVTX range", f"{NSYS_RECORD_HINT}; {EXPORT_AGAIN}")
    # the tables, with the row of each thread instead of its globalTid, and times from the first start
    threads = pl.concat([frame["globalTid"] for frame in parts.values() if "globalTid" in frame.columns]).drop_nulls().unique().sort()
    rows = pl.DataFrame({"globalTid": threads}).with_row_index("thread").with_columns(pl.col("thread").cast(pl.Int64))
    known = {}
    for name, part in parts.items():
        frame = part.join(rows, on="globalTid", how="left", maintain_order="left") if "globalTid" in part.columns else part
        frame = frame.with_columns(pl.col("start_ns") - base, pl.col("end_ns") - base)
        schema = {column: dtype for column, dtype in trace.build_table_schema(name).items() if column != "id"}
        frame = frame.with_columns(pl.col(column).cast(dtype) for column, dtype in schema.items() if frame.schema[column] != dtype)
        known[name] = order_table(name, frame)
    empty = {name: trace.build_empty_table(name) for name in ("frames", "allocations", "collectives")}
    notices = [*notes, *(make_notice(code, hint=NSYS_RECORD_HINT) for table, code in _MISSING.items() if table not in export.columns)]
    took = known["kernels"].select("name", pl.col("end_ns") - pl.col("start_ns"))
    whole = took.filter(pl.col("name").cast(pl.String) == GRAPH_NAME)
    if whole.height:
        share = float(whole["end_ns"].sum()) / max(float(took["end_ns"].sum()), 1)
        notices.append(make_notice(NoticeCode.NSYS_WHOLE_GRAPHS, launches=whole.height, share=share))
    # The Unix time of the trace's zero; event times count from the start of the session
    began = export.read("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])["utcEpochNs"].drop_nulls()
    meta = TraceMeta(
        source=source,
        events=sum(frame.height for frame in parts.values()) + sum(dropped.values()),
        base_ns=base,
        unix_base_ns=int(began[0]) + base if began.len() and began[0] > 0 else None,
        devices=read_devices(export, process),
        threads=nsys_export.read_threads(export, threads),
        record_shapes=signatures.height > 0,
        dropped=dropped,
        uncompressed_bytes=os.path.getsize(source),
        notices=tuple(notices),
        recorder="nsys",
    )
    return Trace(meta=meta, **known, signatures=order_table("signatures", signatures), **empty)


def _add_signatures(ops: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    distinct = ops.select(pl.col("sizes").drop_nulls().unique(maintain_order=True))
    rows = distinct.with_row_index("signature").with_columns(pl.col("signature").cast(pl.Int64))
    ops = ops.join(rows, on="sizes", how="left", maintain_order="left").drop("sizes")
    ops = ops.with_columns(pl.col("name").cast(pl.Categorical()), pl.lit(None, dtype=pl.Int64).alias("fwd_thread"))
    unknown = [pl.lit(None, dtype=pl.String).alias(name) for name in ("dtypes", "strides", "args")]
    return ops, distinct.select(pl.col("sizes").alias("shapes"), *unknown)
