"""Facts about the input pipeline: waits for the DataLoader, its workers, copies from host to device, work on CPU tensors."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import match_column
from gpudiag.attribution.nesting import mark_ancestors
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.bundle import LoaderSettings

DEFAULT_PREFETCH = 2
"""prefetch_factor that torch.utils.data.DataLoader takes where none is given and there are workers."""

NO_LOADER = "no DataLoader call was seen: iterate a torch DataLoader inside the profiled window, or record with gpudiag.profile"


def find_loader_spans(window: Window) -> spans.Spans:
    """Return when the loop was inside the loader's __next__; raises NotKnownError where no call was seen."""
    waits = window.loader_waits
    if waits is None:
        raise NotKnownError(NO_LOADER)
    return spans.build_spans(waits)


def _measure_wait_ns(window: Window) -> int:
    if window.loader_waits is None:
        # The wait in ns by the step records of the bundle: at most the idle time of each recorded step
        records = window.analysis.step_records
        if records is None or records["loader_wait_ns"].null_count() == records.height:
            raise NotKnownError(NO_LOADER)
        numbers = window.steps["name"].str.extract(r"^ProfilerStep#(\d+)$").cast(pl.Int64)
        known = records.filter(pl.col("step").is_in(numbers.drop_nulls().implode()) & pl.col("loader_wait_ns").is_not_null())
        require(known.height == window.steps.height > 0, "the analysed steps are not among the recorded ones: " + NO_LOADER)
        total = int(known["loader_wait_ns"].sum())
        return min(total, window.wall_ns if window.on_cpu else window.analysis.breakdown.idle_ns)
    waits = find_loader_spans(window)
    if window.on_cpu:
        return spans.measure_overlap(waits, window.step_spans)
    return spans.measure_overlap(waits, spans.build_spans(window.idle))


@fact("loader_wait_ns", unit="ns")
def loader_wait_ns(window: Window) -> int:
    """Time of the analysed steps inside the loader's __next__ while the device was idle.

    A wait while the device is still busy costs nothing and does not count. On a CPU-only run the CPU itself fetches the batch: all
    time inside __next__ counts, also what a loader without workers computes there.
    """
    return _measure_wait_ns(window)


@fact("loader_wait_share", unit="share")
def loader_wait_share(window: Window) -> float:
    """loader_wait_ns over the wall time of the analysed steps."""
    return _measure_wait_ns(window) / window.wall_ns


@fact("loader_in_process", unit="bool")
def loader_in_process(window: Window) -> bool:
    """Whether batches are made in the training process itself (num_workers=0)."""
    manifest = window.analysis.manifest
    if manifest is not None and manifest.settings.loader is not None:
        return manifest.settings.loader.num_workers == 0
    waits = window.loader_waits
    if waits is None:
        raise NotKnownError(NO_LOADER)
    return bool(waits["name"].str.contains("_SingleProcessDataLoaderIter").any())


def _read_loader_settings(window: Window) -> LoaderSettings:
    """Return what the bundle says of the DataLoader; raises NotKnownError for a plain trace."""
    manifest = window.analysis.manifest
    if manifest is None or manifest.settings.loader is None:
        raise NotKnownError("the trace does not hold the settings of the DataLoader: record with gpudiag.profile")
    return manifest.settings.loader


@fact("loader_prefetch_factor", unit="count")
def loader_prefetch_factor(window: Window) -> int:
    """Batches that each worker process of the DataLoader prepares ahead; 0 without workers."""
    settings = _read_loader_settings(window)
    if settings.num_workers == 0:
        return 0
    return DEFAULT_PREFETCH if settings.prefetch_factor is None else settings.prefetch_factor


@fact("loader_keeps_workers", unit="bool")
def loader_keeps_workers(window: Window) -> bool:
    """Whether the DataLoader keeps its worker processes between epochs (persistent_workers=True)."""
    return _read_loader_settings(window).persistent_workers


@fact("loader_pins_memory", unit="bool")
def loader_pins_memory(window: Window) -> bool:
    """Whether the DataLoader puts batches into pinned memory (pin_memory=True)."""
    return _read_loader_settings(window).pin_memory


@fact("loader_workers", unit="count")
def loader_workers(window: Window) -> int:
    """Worker processes of the DataLoader."""
    manifest = window.analysis.manifest
    if manifest is not None and manifest.settings.loader is not None:
        return manifest.settings.loader.num_workers
    waits = window.loader_waits
    if waits is not None and waits["name"].str.contains("_SingleProcessDataLoaderIter").all():
        return 0
    raise NotKnownError("the trace does not hold the number of loader workers: record with gpudiag.profile")


_FULL_CORE = 100.0
"""cpu_util_pct of one busy core."""


def _count_cores(window: Window) -> float:
    manifest = window.analysis.manifest
    machine = manifest.machine if manifest else None
    if machine is None or not machine.cpu_cores:
        raise NotKnownError("the number of processor cores is not known: record with gpudiag.profile")
    return min(float(machine.cpu_cores), machine.cpu_quota or float(machine.cpu_cores))


def _measure_cores_used(window: Window) -> float:
    """Return how many cores the process and its workers kept busy, median over the samples of the run."""
    sampled = window.analysis.telemetry
    column = sampled.columns.get("cpu_util_pct") if sampled else None
    if column is None:
        raise NotKnownError("the load of the processor was not sampled: record with gpudiag.profile and telemetry")
    return column.median / _FULL_CORE


@fact("cores_used", unit="count")
def cores_used(window: Window) -> float:
    """Cores that the training process and its loader workers kept busy, median of the samples."""
    return _measure_cores_used(window)


@fact("cores_busy_share", unit="share")
def cores_busy_share(window: Window) -> float:
    """cores_used over the cores that the run may use (those of the machine, or the quota of its control group)."""
    return min(1.0, _measure_cores_used(window) / _count_cores(window))


@fact("worker_cpu_share", unit="share")
def worker_cpu_share(window: Window) -> float:
    """At most this part of the time the loader's workers compute: all CPU time of the run, divided by their number.

    Low: they wait, for storage, the network or a lock.
    """
    manifest = window.analysis.manifest
    workers = manifest.settings.loader.num_workers if manifest and manifest.settings.loader else None
    require(bool(workers), "the DataLoader has no worker processes, or their number is not known")
    return min(1.0, _measure_cores_used(window) / int(workers or 1))


LARGE_COPY_BYTES = 65_536
"""Smaller copies are latency, not bandwidth (rules.md INP-03: bytes >= 64 KiB)."""

PINNED_LINK_SHARE = 0.85
"""Share of the host link's rate that a pinned copy reaches: 80 to 88 % (rules.md INP-03)."""


def find_pageable_copies(window: Window) -> pl.DataFrame:
    """Return the large copies from pageable host memory; raises NotKnownError on a CPU-only run."""
    window.require_accelerator()
    pageable = pl.col("name").str.contains(r"HtoD \(Pageable|Host To Device.*[Pp]ageable")
    return window.kernels.filter((pl.col("kind") == "memcpy") & pageable & (pl.col("bytes") >= LARGE_COPY_BYTES))


def _require_memory_kinds(window: Window) -> None:
    """Raise NotKnownError where copies to the device were recorded without the kind of host memory (as ROCm does)."""
    copies = window.kernels.filter((pl.col("kind") == "memcpy") & pl.col("name").str.contains("HtoD"))
    named = copies.filter(pl.col("name").str.contains("Pageable|Pinned"))
    require(copies.height == named.height, "the profiler did not record whether host memory was pinned (ROCm does not)")


@fact("pageable_copy_exposed_ns", unit="ns")
def pageable_copy_exposed_ns(window: Window) -> int:
    """Time that only copies of 64 KiB or more from pageable host memory fill: nothing else ran on the device."""
    window.require_accelerator()
    _require_memory_kinds(window)
    return window.exposed_ns(find_pageable_copies(window))


@fact("pageable_copy_exposed_share", unit="share")
def pageable_copy_exposed_share(window: Window) -> float:
    """pageable_copy_exposed_ns over the wall time of the analysed steps."""
    window.require_accelerator()
    _require_memory_kinds(window)
    return window.exposed_ns(find_pageable_copies(window)) / window.wall_ns


@fact("pageable_copy_bytes", unit="B")
def pageable_copy_bytes(window: Window) -> int:
    """Bytes copied to the device from pageable memory in copies of 64 KiB or more, within the analysed steps."""
    return int(find_pageable_copies(window)["bytes"].sum())


@fact("pageable_copy_rate", unit="ratio")
def pageable_copy_rate(window: Window) -> float:
    """Rate of these copies in GB/s (1e9 bytes a second)."""
    copies = find_pageable_copies(window)
    require(copies.height > 0, "no large copy from pageable memory")
    return float(copies["bytes"].sum()) / float(copies["busy_ns"].sum())


@fact("pinned_copy_ns", unit="ns")
def pinned_copy_ns(window: Window) -> float:
    """Time that pinned copies of the same bytes would take at 85 % of the host link."""
    link = window.device.pcie_byte_per_s
    if link is None:
        raise NotKnownError("the rate of the host link is not known for this device")
    return float(find_pageable_copies(window)["bytes"].sum()) / (PINNED_LINK_SHARE * link) * 1e9


SMALL_COPY_BYTES = 4096
"""A copy below this is all latency (rules.md SYN-05)."""

LONG_OP_NS = 50_000
"""A CPU op that launches nothing is work on CPU tensors from this time on: views and checks take some microseconds (heuristic)."""

_TO_DEVICE = r"(?i)HtoD|Host To Device|HostToDevice"
_PINNED = r"(?i)pinned"


def find_copies_to_device(window: Window) -> pl.DataFrame:
    """Return the copies from host to device; raises NotKnownError on a CPU-only run."""
    window.require_accelerator()
    return window.kernels.filter((pl.col("kind") == "memcpy") & pl.col("name").str.contains(_TO_DEVICE))


def find_small_copies(window: Window) -> pl.DataFrame:
    """Return the copies to the device below 4 KiB."""
    return find_copies_to_device(window).filter(pl.col("bytes") < SMALL_COPY_BYTES)


def find_pinned_copies(window: Window) -> pl.DataFrame:
    """Return the copies of 64 KiB and more from pinned memory; those from pageable memory are INP-03's."""
    return find_copies_to_device(window).filter(pl.col("name").str.contains(_PINNED) & (pl.col("bytes") >= LARGE_COPY_BYTES))


def find_cpu_tensor_work(window: Window) -> pl.DataFrame:
    """Return the outermost CPU ops of the steps that launch nothing and take 50 us or more, the optimizer's and the loader's aside.

    Step counters of optimizers live on the CPU by intention; batches made in the loop are INP-01's.
    """
    window.require_accelerator()
    trace = window.analysis.trace
    known = trace.ops.height > 0 and trace.launches.height > 0
    require(known, "no ops or no runtime calls were recorded: record with activities=[CPU, CUDA]")
    ops = trace.ops.select("id", "parent", "step", "phase").filter(pl.col("step").is_in(window.steps["id"].implode()))
    ids = trace.launches["op"].drop_nulls().unique()
    reached = mark_ancestors(trace.ops["parent"].fill_null(-1).to_numpy(), ids.to_numpy())
    launching = pl.Series(np.flatnonzero(reached), dtype=pl.Int64)
    silent = ops.filter(~pl.col("id").is_in(launching.implode()) & ~pl.col("phase").is_in(["optimizer", "data"]).fill_null(False))
    outer = silent.filter(~pl.col("parent").is_in(silent["id"].implode()).fill_null(False))["id"]
    waits = window.loader_waits
    long = pl.col("end_ns") - pl.col("start_ns") >= LONG_OP_NS
    found = trace.ops.filter(pl.col("id").is_in(outer.implode()) & long & match_column("name", "^aten::"))
    if waits is None or not found.height:
        return found
    inside = spans.measure_covered(spans.build_spans(waits), found["start_ns"].to_numpy(), found["end_ns"].to_numpy())
    return found.filter(pl.Series(inside == 0))


def _find_idle_spans(window: Window) -> spans.Spans:
    return spans.build_spans(window.idle.filter(pl.col("cause").is_in(["idle_launch", "idle_sync", "idle_unexplained"])))


@fact("small_copies_per_step", unit="count")
def small_copies_per_step(window: Window) -> float:
    """Copies to the device below 4 KiB per analysed step."""
    require(window.steps.height > 0, "no complete step was recorded")
    return find_small_copies(window).height / window.steps.height


def _find_copy_calls(window: Window) -> spans.Spans:
    """Return when the host was inside the calls that start small copies, and inside the ops around them."""
    trace, copies = window.analysis.trace, find_small_copies(window)
    calls = trace.launches.filter(pl.col("id").is_in(copies["launch"].drop_nulls().implode())).select("start_ns", "end_ns")
    ops = trace.ops.filter(pl.col("id").is_in(copies["op"].drop_nulls().implode())).select("start_ns", "end_ns")
    return spans.build_spans(pl.concat([calls, ops]))


@fact("small_copy_cost_ns", unit="ns")
def small_copy_cost_ns(window: Window) -> int:
    """Time that small copies fill alone, and idle time of the device while the host was in the calls that start them."""
    return window.exposed_ns(find_small_copies(window)) + spans.measure_overlap(_find_copy_calls(window), _find_idle_spans(window))


@fact("cpu_tensor_cost_ns", unit="ns")
def cpu_tensor_cost_ns(window: Window) -> int:
    """Idle time of the GPU while the host computed on CPU tensors: ops of 50 us and more that launch nothing."""
    return spans.measure_overlap(spans.build_spans(find_cpu_tensor_work(window)), _find_idle_spans(window))


@fact("cpu_tensor_cost_share", unit="share")
def cpu_tensor_cost_share(window: Window) -> float:
    """cpu_tensor_cost_ns over the wall time of the analysed steps."""
    return cpu_tensor_cost_ns(window) / window.wall_ns  # type: ignore[operator]


@fact("cpu_side_cost_ns", unit="ns")
def cpu_side_cost_ns(window: Window) -> float:
    """small_copy_cost_ns and cpu_tensor_cost_ns together."""
    both = spans.merge_spans(np.concatenate((_find_copy_calls(window), spans.build_spans(find_cpu_tensor_work(window)))))
    return float(window.exposed_ns(find_small_copies(window)) + spans.measure_overlap(both, _find_idle_spans(window)))


@fact("cpu_side_cost_share", unit="share")
def cpu_side_cost_share(window: Window) -> float:
    """cpu_side_cost_ns over the wall time of the analysed steps."""
    return float(cpu_side_cost_ns(window)) / window.wall_ns


@fact("pinned_copy_exposed_ns", unit="ns")
def pinned_copy_exposed_ns(window: Window) -> int:
    """Time that only copies of 64 KiB or more from pinned host memory fill: nothing else ran on the device."""
    _require_pinned_kinds(window)
    return window.exposed_ns(find_pinned_copies(window))


@fact("pinned_copy_exposed_share", unit="share")
def pinned_copy_exposed_share(window: Window) -> float:
    """pinned_copy_exposed_ns over the wall time of the analysed steps."""
    _require_pinned_kinds(window)
    return window.exposed_ns(find_pinned_copies(window)) / window.wall_ns


def _require_pinned_kinds(window: Window) -> None:
    copies = find_copies_to_device(window)
    told = copies.filter(pl.col("name").str.contains("Pageable|Pinned"))
    require(copies.height == told.height, "the profiler did not record whether host memory was pinned (ROCm does not)")


@fact("pinned_copy_bytes", unit="B")
def pinned_copy_bytes(window: Window) -> int:
    """Bytes copied to the device from pinned memory in copies of 64 KiB or more, within the analysed steps."""
    return int(find_pinned_copies(window)["bytes"].sum())


@fact("pinned_copy_rate", unit="ratio")
def pinned_copy_rate(window: Window) -> float:
    """Rate of these copies in GB/s (1e9 bytes a second)."""
    copies = find_pinned_copies(window)
    require(copies.height > 0, "no large copy from pinned memory")
    return float(copies["bytes"].sum()) / float(copies["busy_ns"].sum())


@fact("pinned_copies_in_line_share", unit="share")
def pinned_copies_in_line_share(window: Window) -> float:
    """Part of these copies (by time) on the stream that runs most kernels: nothing of that stream can run beside them."""
    copies = find_pinned_copies(window)
    require(copies.height > 0, "no large copy from pinned memory")
    kernels = window.kernels.filter(pl.col("kind") == "kernel").group_by("stream").agg(pl.col("time_ns").sum()).sort("time_ns", "stream")
    require(kernels.height > 0, "no kernel was recorded in the analysed steps")
    return float(copies.filter(pl.col("stream") == kernels["stream"][-1])["time_ns"].sum()) / float(copies["time_ns"].sum())


@fact("batches_overlapped_ns", unit="ns")
def batches_overlapped_ns(window: Window) -> float:
    """Time saved if pinned copies ran beside other work: what-if copies=overlapped, at most the time that only they fill."""
    exposed = float(pinned_copy_exposed_ns(window))
    return min(window.less_work_ns("copies=overlapped", otherwise=lambda: exposed), exposed)
