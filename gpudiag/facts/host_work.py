"""Facts about small copies to the device and about tensors of the CPU that hold up a GPU (SYN-05), and pinned copies (INP-04)."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import matches
from gpudiag.attribution.nesting import with_parents
from gpudiag.facts.host_copies import LARGE_COPY_BYTES
from gpudiag.facts.registry import fact, require
from gpudiag.facts.window import Window

SMALL_COPY_BYTES = 4096
"""A copy below this is all latency (rules.md SYN-05)."""

LONG_OP_NS = 50_000
"""A CPU op that launches nothing is work on CPU tensors from this time on: views and checks take some microseconds (heuristic)."""

_TO_DEVICE = r"(?i)HtoD|Host To Device|HostToDevice"
_PINNED = r"(?i)pinned"


def to_device(window: Window) -> pl.DataFrame:
    """Return the copies from host to device; raises NotKnownError on a CPU-only run."""
    window.require_accelerator()
    return window.kernels.filter((pl.col("kind") == "memcpy") & pl.col("name").str.contains(_TO_DEVICE))


def small_copies(window: Window) -> pl.DataFrame:
    """Return the copies to the device below 4 KiB."""
    return to_device(window).filter(pl.col("bytes") < SMALL_COPY_BYTES)


def pinned_copies(window: Window) -> pl.DataFrame:
    """Return the copies of 64 KiB and more from pinned memory; those from pageable memory are INP-03's."""
    return to_device(window).filter(pl.col("name").str.contains(_PINNED) & (pl.col("bytes") >= LARGE_COPY_BYTES))


def cpu_tensor_work(window: Window) -> pl.DataFrame:
    """Return the outermost CPU ops of the steps that launch nothing and take 50 us or more, the optimizer's and the loader's aside.

    Step counters of optimizers live on the CPU by intention; batches made in the loop are INP-01's.
    """
    window.require_accelerator()
    trace = window.analysis.trace
    known = trace.ops.height > 0 and trace.launches.height > 0
    require(known, "no ops or no runtime calls were recorded: record with activities=[CPU, CUDA]")
    ops = trace.ops.select("id", "parent", "step", "phase").filter(pl.col("step").is_in(window.steps["id"].implode()))
    launching = _with_parents(trace.ops, trace.launches["op"].drop_nulls().unique())
    silent = ops.filter(~pl.col("id").is_in(launching.implode()) & ~pl.col("phase").is_in(["optimizer", "data"]).fill_null(False))
    outer = silent.filter(~pl.col("parent").is_in(silent["id"].implode()).fill_null(False))["id"]
    waits = window.loader_waits
    long = pl.col("end_ns") - pl.col("start_ns") >= LONG_OP_NS
    found = trace.ops.filter(pl.col("id").is_in(outer.implode()) & long & matches("name", "^aten::"))
    if waits is None or not found.height:
        return found
    inside = spans.covered(spans.of(waits), found["start_ns"].to_numpy(), found["end_ns"].to_numpy())
    return found.filter(pl.Series(inside == 0))


def _with_parents(ops: pl.DataFrame, ids: pl.Series) -> pl.Series:
    """Return `ids` and the ids of all ops around them."""
    reached = with_parents(ops["parent"].fill_null(-1).to_numpy(), ids.to_numpy())
    return pl.Series(np.flatnonzero(reached), dtype=pl.Int64)


def _idle_spans(window: Window) -> spans.Spans:
    return spans.of(window.idle.filter(pl.col("cause").is_in(["idle_launch", "idle_sync", "idle_unexplained"])))


@fact("small_copies_per_step", unit="count")
def small_copies_per_step(window: Window) -> float:
    """Copies to the device below 4 KiB per analysed step."""
    require(window.steps.height > 0, "no complete step was recorded")
    return small_copies(window).height / window.steps.height


def _copy_calls(window: Window) -> spans.Spans:
    """Return when the host was inside the calls that start small copies, and inside the ops around them."""
    trace, copies = window.analysis.trace, small_copies(window)
    calls = trace.launches.filter(pl.col("id").is_in(copies["launch"].drop_nulls().implode())).select("start_ns", "end_ns")
    ops = trace.ops.filter(pl.col("id").is_in(copies["op"].drop_nulls().implode())).select("start_ns", "end_ns")
    return spans.of(pl.concat([calls, ops]))


@fact("small_copy_cost_ns", unit="ns")
def small_copy_cost_ns(window: Window) -> int:
    """Time that small copies fill alone, and idle time of the device while the host was in the calls that start them."""
    return window.exposed_ns(small_copies(window)) + spans.overlap(_copy_calls(window), _idle_spans(window))


@fact("cpu_tensor_cost_ns", unit="ns")
def cpu_tensor_cost_ns(window: Window) -> int:
    """Idle time of the GPU while the host computed on CPU tensors: ops of 50 us and more that launch nothing."""
    return spans.overlap(spans.of(cpu_tensor_work(window)), _idle_spans(window))


@fact("cpu_tensor_cost_share", unit="share")
def cpu_tensor_cost_share(window: Window) -> float:
    """cpu_tensor_cost_ns over the wall time of the analysed steps."""
    return cpu_tensor_cost_ns(window) / window.wall_ns  # type: ignore[operator]


@fact("cpu_side_cost_ns", unit="ns")
def cpu_side_cost_ns(window: Window) -> float:
    """small_copy_cost_ns and cpu_tensor_cost_ns together."""
    both = spans.union(np.concatenate((_copy_calls(window), spans.of(cpu_tensor_work(window)))))
    return float(window.exposed_ns(small_copies(window)) + spans.overlap(both, _idle_spans(window)))


@fact("cpu_side_cost_share", unit="share")
def cpu_side_cost_share(window: Window) -> float:
    """cpu_side_cost_ns over the wall time of the analysed steps."""
    return float(cpu_side_cost_ns(window)) / window.wall_ns


@fact("pinned_copy_exposed_ns", unit="ns")
def pinned_copy_exposed_ns(window: Window) -> int:
    """Time that only copies of 64 KiB or more from pinned host memory fill: nothing else ran on the device."""
    _require_kinds(window)
    return window.exposed_ns(pinned_copies(window))


@fact("pinned_copy_exposed_share", unit="share")
def pinned_copy_exposed_share(window: Window) -> float:
    """pinned_copy_exposed_ns over the wall time of the analysed steps."""
    _require_kinds(window)
    return window.exposed_ns(pinned_copies(window)) / window.wall_ns


def _require_kinds(window: Window) -> None:
    copies = to_device(window)
    told = copies.filter(pl.col("name").str.contains("Pageable|Pinned"))
    require(copies.height == told.height, "the profiler did not record whether host memory was pinned (ROCm does not)")


@fact("pinned_copy_bytes", unit="B")
def pinned_copy_bytes(window: Window) -> int:
    """Bytes copied to the device from pinned memory in copies of 64 KiB or more, within the analysed steps."""
    return int(pinned_copies(window)["bytes"].sum())


@fact("pinned_copy_rate", unit="ratio")
def pinned_copy_rate(window: Window) -> float:
    """Rate of these copies in GB/s (1e9 bytes a second)."""
    copies = pinned_copies(window)
    require(copies.height > 0, "no large copy from pinned memory")
    return float(copies["bytes"].sum()) / float(copies["busy_ns"].sum())


@fact("pinned_copies_in_line_share", unit="share")
def pinned_copies_in_line_share(window: Window) -> float:
    """Part of these copies (by time) on the stream that runs most kernels: nothing of that stream can run beside them."""
    copies = pinned_copies(window)
    require(copies.height > 0, "no large copy from pinned memory")
    kernels = window.kernels.filter(pl.col("kind") == "kernel").group_by("stream").agg(pl.col("time_ns").sum()).sort("time_ns", "stream")
    require(kernels.height > 0, "no kernel was recorded in the analysed steps")
    return float(copies.filter(pl.col("stream") == kernels["stream"][-1])["time_ns"].sum()) / float(copies["time_ns"].sum())


@fact("batches_overlapped_ns", unit="ns")
def batches_overlapped_ns(window: Window) -> float:
    """Time saved if pinned copies ran beside other work: what-if copies=overlapped, at most the time that only they fill."""
    exposed = float(pinned_copy_exposed_ns(window))
    return min(window.less_work_ns("copies=overlapped", otherwise=lambda: exposed), exposed)
