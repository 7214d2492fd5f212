"""NVTX ranges of one process: ops where PyTorch wrote them (torch.autograd.profiler.emit_nvtx), else annotations.

emit_nvtx gives each op a range 'aten::mm, seq = 12, op_id = 7, sizes = [[8, 8], [8, 8]], input_op_ids = [...]', every part but the name
optional (torch/csrc/profiler/util.cpp, getNvtxStr). Sizes are those of tensors, lists of tensors flattened; types are not recorded.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from gpudiag.trace.categories import BACKEND_CALLS, GRAPH_CALL
from gpudiag.trace.nsys.database import Export
from gpudiag.trace.nsys.processes import RANGES, of_process

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


class Ranges(NamedTuple):
    """Ops with `sizes` as text, and annotations; both with globalTid, name, start_ns and end_ns, in no order."""

    ops: pl.DataFrame
    marks: pl.DataFrame


def read_ranges(export: Export, process: int | None, dropped: dict[str, int]) -> Ranges:
    """Return the NVTX ranges of `process`; those of libraries and those that never ended are counted in `dropped`."""
    events = of_process(_events(export), process)
    ranges = events.filter(pl.col("eventType").is_in([_PUSH_POP, _START_END]))
    ranges = ranges.join(_domains(events), on="domainId", how="left", maintain_order="left").with_columns(pl.col("domain").fill_null(""))
    ranges = _counted(ranges, pl.col("domain").is_in(_LIBRARIES), "NVTX ranges of libraries", dropped)
    open_ = pl.col("end_ns").is_null() | ((pl.col("end_ns") == 0) & (pl.col("start_ns") > 0))  # 0: older exports have no nulls
    ranges = _counted(ranges, open_, "NVTX ranges that were not ended", dropped)
    told = _told(ranges["text"])
    ranges = ranges.join(told, on="text", how="left", maintain_order="left")
    is_op = (pl.col("eventType") == _PUSH_POP) & (pl.col("domain") == "") & pl.col("op")
    ops = ranges.filter(is_op).select("globalTid", "name", "start_ns", "end_ns", "sequence", "sizes")
    return Ranges(ops, _annotations(ranges.filter(~is_op)))


def _events(export: Export) -> pl.DataFrame:
    """Return the events with their text, which stands in a column of its own or, where it was registered, in StringIds."""
    frame = export.read(RANGES, ["start", "end", "eventType", "globalTid", "domainId", "textId"], ["text"])
    strings = export.strings(RANGES, "textId")
    frame = frame.join(strings, left_on="textId", right_on="id", how="left", maintain_order="left")
    return frame.with_columns(
        pl.coalesce("text", "value", pl.lit("")).alias("text"),
        pl.col("domainId").fill_null(0),
        pl.col("start").alias("start_ns"),
        pl.col("end").alias("end_ns"),
    )


def _domains(events: pl.DataFrame) -> pl.DataFrame:
    """Return (domainId, domain) of the domains that have a name; the default one has none."""
    made = events.filter((pl.col("eventType") == _DOMAIN) & (pl.col("domainId") != 0))
    return made.select("domainId", pl.col("text").alias("domain")).unique("domainId", keep="first", maintain_order=True)


def _counted(ranges: pl.DataFrame, unwanted: pl.Expr, what: str, dropped: dict[str, int]) -> pl.DataFrame:
    kept = ranges.filter(~unwanted)
    if kept.height < ranges.height:
        dropped[what] = ranges.height - kept.height
    return kept


def _told(texts: pl.Series) -> pl.DataFrame:
    """Return what each distinct text says: name, sequence, sizes, and whether torch wrote it for an op."""
    text = pl.col("text")
    split = text.str.replace(f"{_SUFFIX}.*$", "")
    found = pl.DataFrame({"text": texts.unique()}).with_columns(
        name=split,
        sequence=text.str.extract(_SEQUENCE).cast(pl.Int64, strict=False),
        sizes=text.str.extract(_SIZES),
    )
    named = pl.col("name").str.contains(_OPERATOR) | pl.col("name").str.contains(_CALLS)
    return found.with_columns(op=pl.col("sequence").is_not_null() | pl.col("sizes").is_not_null() | named)


def _annotations(ranges: pl.DataFrame) -> pl.DataFrame:
    """Return the other ranges; 'step 12' of our own domain gets the name of the profiler's step marks, as the firmest sign of steps."""
    own = (pl.col("domain") == OWN_DOMAIN) & pl.col("name").str.contains(_OWN_STEP)
    name = pl.when(own).then(pl.col("name").str.replace(_OWN_STEP, "ProfilerStep#${1}")).otherwise("name")
    return ranges.select("globalTid", name.alias("name"), pl.lit("annotation").alias("category"), "start_ns", "end_ns")


def overheads(export: Export, process: int | None) -> pl.DataFrame:
    """Return the time that the profiler itself took on the threads of `process`, as marks."""
    frame = of_process(export.read("PROFILER_OVERHEAD", ["start", "end", "globalTid", "nameId"]), process)
    strings = export.strings("PROFILER_OVERHEAD", "nameId").rename({"id": "nameId", "value": "name"})
    frame = frame.join(strings, on="nameId", how="left", maintain_order="left")
    return frame.select(
        "globalTid",
        pl.col("name").fill_null("Nsight Systems overhead"),
        pl.lit("overhead").alias("category"),
        pl.col("start").alias("start_ns"),
        pl.col("end").alias("end_ns"),
    )
