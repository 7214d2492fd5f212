"""Facts about the input pipeline: waits for the DataLoader, its workers, copies from host to device, work on CPU tensors."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.names import match_column
from gpudiag.attribution.nesting import mark_ancestors
from gpudiag.facts.fields import field_fact
from gpudiag.facts.hardware_state import usable_cores
from gpudiag.facts.registry import NotKnownError, fact, fact_of, per_step, require, require_known, total, with_share
from gpudiag.facts.window import Window, copies, divide_sums
from gpudiag.model.bundle import WORKERS_STARTED, LoaderSettings
from gpudiag.timeline.history import MIN_FOR_PACE, SETTLED_AFTER
from gpudiag.timeline.whatif.device_time import PAGEABLE_COPY, PINNED_LINK_SHARE
from gpudiag.trace.kernel_names import HOST_COPY, LOADER_MARK

DEFAULT_PREFETCH = 2
"""prefetch_factor that torch.utils.data.DataLoader takes where none is given and there are workers."""

_IN_PROCESS = "_SingleProcessDataLoaderIter"
"""Iterator of a DataLoader without workers (torch.utils.data)."""

_LOADER_FRAME = r"torch/utils/data/(?:dataloader\.py\(\d+\): __next__|_utils/fetch\.py\()"
_FETCHES = r"_utils/fetch\.py\("
"""Frame of the process that makes the batches (torch.utils.data)."""

_NO_SETTINGS = "the trace does not hold the settings of the DataLoader: record with gpudiag.profile"
NO_LOADER = "no DataLoader call was seen: iterate a torch DataLoader inside the profiled window, or record with gpudiag.profile"


def loader_wait_ns(window: Window) -> int:
    """Time of the analysed steps inside the loader's __next__ while the device was idle.

    A wait while the device is still busy costs nothing and does not count. On a CPU-only run the CPU itself fetches the batch: all
    time inside __next__ counts, also what a loader without workers computes there.
    """
    if window.loader_waits is not None:
        within = window.step_spans if window.on_cpu else window.idle_spans()
        return spans.measure_overlap(spans.build_spans(window.loader_waits), within)
    # by the step records of the bundle: at most the idle time of each recorded step
    records = window.analysis.step_records
    if records is None or records["loader_wait_ns"].null_count() == records.height:
        raise NotKnownError(NO_LOADER)
    numbers = window.steps["name"].str.extract(r"^ProfilerStep#(\d+)$").cast(pl.Int64)
    known = records.filter(pl.col("step").is_in(numbers.drop_nulls().implode()) & pl.col("loader_wait_ns").is_not_null())
    require(known.height == window.steps.height > 0, "the analysed steps are not among the recorded ones: " + NO_LOADER)
    return min(int(known["loader_wait_ns"].sum()), window.wall_ns if window.on_cpu else window.analysis.breakdown.idle_ns)


def measure_plain_wait(window: Window) -> float | None:
    """Return the share of the loader's waits in the unprofiled steps of a CPU-only run; None elsewhere, and where too few were recorded.

    The profiler slows batches that the CPU makes with ops in another measure than the step, and the few recorded steps may be others than
    those of the run. Under a GPU at work a wait costs nothing: there the recorded idle time tells it.
    """
    records = window.analysis.step_records
    if records is None or not window.on_cpu:
        return None
    plain = records.filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain"))
    seen = plain.height - plain["loader_wait_ns"].null_count()
    return min(1.0, int(plain["loader_wait_ns"].sum()) / max(1, int(plain["wall_ns"].sum()))) if seen >= MIN_FOR_PACE else None


def _read_plain_waits(window: Window) -> pl.DataFrame:
    records = require_known(window.analysis.step_records, _NO_SETTINGS)
    plain = records.filter((pl.col("step") >= SETTLED_AFTER) & (pl.col("window") == "plain") & pl.col("loader_wait_ns").is_not_null())
    require(plain.height >= MIN_FOR_PACE, f"fewer than {MIN_FOR_PACE} unprofiled steps that waited for batches: let the recording run on")
    return plain


def loader_wait_share(window: Window) -> float:
    """Time in the loader's __next__ over the wall time of all unprofiled steps on a CPU; else loader_wait_ns over that of the analysed
    steps."""
    plain = measure_plain_wait(window)
    return loader_wait_ns(window) / window.wall_ns if plain is None else plain


def _find_loader_settings(window: Window) -> LoaderSettings | None:
    return window.analysis.manifest.settings.loader if window.analysis.manifest else None


def _list_loader_frames(window: Window) -> pl.Series:
    names = window.analysis.trace.frames["name"].unique().cast(pl.String)
    found: pl.Series = names.filter(names.str.contains(_LOADER_FRAME))
    return found


def loader_workers(window: Window) -> int:
    """Worker processes of the DataLoader."""
    if (settings := _find_loader_settings(window)) is not None:
        return settings.num_workers
    waits = window.loader_waits
    without = waits is not None and waits["name"].str.contains(_IN_PROCESS).all()
    require(without, "the trace does not hold the number of loader workers: record with gpudiag.profile")
    return 0


def loader_in_process(window: Window) -> bool:
    """Whether batches are made in the training process itself (num_workers=0)."""
    if (settings := _find_loader_settings(window)) is not None:
        return settings.num_workers == 0
    names = require_known(window.loader_waits, NO_LOADER)["name"]
    if (frames := _list_loader_frames(window)).len() and not names.str.contains(LOADER_MARK).any():
        return bool(frames.str.contains(_FETCHES).any())
    require(names.str.contains(LOADER_MARK).any(), "only a call of torch's DataLoader tells whether it has workers")
    return bool(names.str.contains(_IN_PROCESS).any())


def loader_seen(window: Window) -> bool:
    """Whether a DataLoader of torch was iterated while recording: by the settings in a bundle, else by its marks or its Python frames."""
    waits = window.loader_waits
    marked = waits is not None and waits["name"].str.contains(LOADER_MARK).any()
    if marked or _find_loader_settings(window) is not None or _list_loader_frames(window).len():
        return True
    require(window.analysis.manifest is not None or window.analysis.trace.ops.height > 0, NO_LOADER)
    return False


def loader_restart_share(window: Window) -> float:
    """What waits for a batch take beyond the median in unprofiled steps in which the loader starts its workers, over the time of all
    these steps; 0 where it starts them once."""
    require(loader_workers(window) > 0, "the DataLoader has no worker processes")
    plain, marks = _read_plain_waits(window), require_known(window.analysis.host_marks, _NO_SETTINGS)
    starts = marks.filter(pl.col("kind") == "loader", pl.col("name").str.ends_with(WORKERS_STARTED))["step"]
    wait = plain.filter(pl.col("step").is_in(starts.drop_nulls().implode()))["loader_wait_ns"]
    usual = plain.filter(~pl.col("step").is_in(starts.drop_nulls().implode()))["loader_wait_ns"].median() or 0
    excess = int((wait - usual).clip(lower_bound=0).sum()) if len(wait) > 1 else 0
    return min(1.0, excess / max(1, int(plain["wall_ns"].sum())))


MIN_LATE, IN_TURN = 8, 0.8
"""Pauses between late batches that tell a habit, and the part of them that are as long (heuristic: of chance half of them may be)."""


def loader_late_in_turn(window: Window) -> bool:
    """Whether one batch in as many as the DataLoader has workers, which make them in turn, is late: its wait is more than half of those
    of the batches around it."""
    workers = loader_workers(window)
    require(workers > 1, "the batches do not come from several workers in turn")
    plain = _read_plain_waits(window)
    around = plain["loader_wait_ns"].rolling_sum(2 * workers - 1, center=True, min_samples=1)
    apart = plain.filter(2 * plain["loader_wait_ns"] > around)["step"].diff().drop_nulls()
    return len(apart) >= MIN_LATE and (apart == workers).sum() >= IN_TURN * len(apart)


def cores_used(window: Window) -> float:
    """Cores that the training process and its loader workers kept busy, median of the samples."""
    sampled = window.analysis.telemetry
    column = sampled.columns.get("cpu_util_pct") if sampled else None
    return require_known(column, "the load of the processor was not sampled: record with gpudiag.profile and telemetry").median / 100


def cores_busy_share(window: Window) -> float:
    """cores_used over the cores that the run may use (those of the machine, or the quota of its control group)."""
    return min(1.0, cores_used(window) / usable_cores(window))


def worker_cpu_share(window: Window) -> float:
    """At most this part of the time the loader's workers compute, and do not wait: all CPU time of the run, divided by their number."""
    require((workers := loader_workers(window)) > 0, "the DataLoader has no worker processes")
    used, sampled = cores_used(window), window.analysis.telemetry
    long = sampled is not None and sampled.samples * sampled.interval_ns >= LOOKED_AT_NS
    require(long, "the run was too short to tell what its worker processes compute: let it run on for 15 s")
    return min(1.0, used / workers)


LOOKED_AT_NS = 15 * 10**9
"""Processes are looked for every 5 s or more rarely: before the second time nothing is known of what workers compute."""

LARGE_COPY_BYTES = 65_536
"""Smaller copies are latency, not bandwidth (rules.md INP-03: bytes >= 64 KiB)."""

SMALL_COPY_BYTES = 4096
"""A copy below this is all latency (rules.md SYN-05)."""

LONG_OP_NS = 50_000
"""A CPU op that launches nothing is work on CPU tensors from this time on: views and checks take some microseconds (heuristic)."""

_TO_DEVICE = r"(?i)HtoD|Host To Device|HostToDevice"

find_pageable_copies = copies(PAGEABLE_COPY, least_bytes=LARGE_COPY_BYTES)
find_pinned_copies = copies(_TO_DEVICE, r"(?i)pinned", least_bytes=LARGE_COPY_BYTES)
find_small_copies = copies(_TO_DEVICE, below_bytes=SMALL_COPY_BYTES)


def require_memory_kinds(found: pl.DataFrame) -> None:
    """Raise NotKnownError where one of these copies was recorded without the kind of host memory (as ROCm does)."""
    named = found.filter(pl.col("name").str.contains("Pageable|Pinned"))
    require(found.height == named.height, "the profiler did not record whether host memory was pinned (ROCm does not)")


def pageable_copy_exposed_ns(window: Window) -> int:
    """Time that only copies of 64 KiB or more from or to pageable host memory fill: nothing else ran on the device."""
    require_memory_kinds(copies(HOST_COPY)(window))
    return window.exposed_ns(find_pageable_copies(window))


def pinned_copy_exposed_ns(window: Window) -> int:
    """Time that only copies of 64 KiB or more from pinned host memory fill: nothing else ran on the device."""
    require_memory_kinds(copies(_TO_DEVICE)(window))
    return window.exposed_ns(find_pinned_copies(window))


def pinned_copy_ns(window: Window) -> float:
    """Time that pinned copies of the same bytes would take at 85 % of the host link."""
    link = require_known(window.device.pcie_byte_per_s, "the rate of the host link is not known for this device")
    return float(find_pageable_copies(window)["bytes"].sum()) / (PINNED_LINK_SHARE * link) * 1e9


def pinned_copies_in_line_share(window: Window) -> float:
    """Part of these copies (by time) on the stream that runs most kernels: nothing of that stream can run beside them."""
    copies = find_pinned_copies(window)
    require(copies.height > 0, "no large copy from pinned memory")
    kernels = window.kernels.filter(pl.col("kind") == "kernel").group_by("stream").agg(pl.col("time_ns").sum()).sort("time_ns", "stream")
    require(kernels.height > 0, "no kernel was recorded in the analysed steps")
    return float(copies.filter(pl.col("stream") == kernels["stream"][-1])["time_ns"].sum()) / float(copies["time_ns"].sum())


def find_cpu_tensor_work(window: Window) -> pl.DataFrame:
    """Return the outermost CPU ops of the steps that launch nothing and take 50 us or more, the optimizer's and the loader's aside.

    Step counters of optimizers live on the CPU by intention; batches made in the loop are INP-01's.
    """
    window.require_accelerator()
    trace = window.analysis.trace
    require(trace.ops.height * trace.launches.height > 0, "no ops or no runtime calls were recorded: record with activities=[CPU, CUDA]")
    ids = trace.launches["op"].drop_nulls().unique()
    reached = mark_ancestors(trace.ops["parent"].fill_null(-1).to_numpy(), ids.to_numpy())
    other = window.within_steps & ~pl.col("phase").is_in(["optimizer", "data"]).fill_null(False)
    silent = trace.ops.select("id", "parent", "step", "phase").filter(other, pl.Series(~reached, dtype=pl.Boolean))
    outer = silent.filter(~pl.col("parent").is_in(silent["id"].implode()).fill_null(False))["id"]
    long = pl.col("end_ns") - pl.col("start_ns") >= LONG_OP_NS
    return drop_loading(window, trace.ops.filter(pl.col("id").is_in(outer.implode()) & long & match_column("name", "^aten::")))


def drop_loading(window: Window, work: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of `work` that lie in no wait for a batch: that makes it, and is the loader's."""
    if window.loader_waits is None or not work.height:
        return work
    waits = spans.build_spans(window.loader_waits)
    return work.filter(pl.Series(spans.measure_covered(waits, work["start_ns"].to_numpy(), work["end_ns"].to_numpy()) == 0))


def _measure_idle_under_ns(window: Window, host: spans.Spans) -> int:
    return spans.measure_overlap(host, window.idle_spans("idle_launch", "idle_sync", "idle_unexplained"))


def find_ops_around_copies(window: Window) -> pl.DataFrame:
    """Return the ops that start small copies."""
    return window.analysis.trace.ops.filter(pl.col("id").is_in(find_small_copies(window)["op"].drop_nulls().implode()))


def cpu_tensor_cost_ns(window: Window) -> int:
    """Idle time of the GPU while the host computed on CPU tensors: ops of 50 us and more that launch nothing."""
    return _measure_idle_under_ns(window, spans.build_spans(find_cpu_tensor_work(window)))


def cpu_side_cost_ns(window: Window) -> float:
    """cpu_tensor_cost_ns, the time that small copies fill alone, and idle time while the host was in the calls that start them."""
    launches, copied = window.analysis.trace.launches, find_small_copies(window)["launch"].drop_nulls()
    calls = launches.filter(pl.col("id").is_in(copied.implode()))
    frames = (calls, find_ops_around_copies(window), find_cpu_tensor_work(window))
    both = spans.build_spans(pl.concat([frame.select("start_ns", "end_ns") for frame in frames]))
    return float(window.exposed_ns(find_small_copies(window)) + _measure_idle_under_ns(window, both))


# fmt: off
FACTS = (
    fact_of(loader_wait_ns, "ns"),
    fact_of(loader_wait_share, "share"),
    fact("loader_wait_base", "text", "Of which steps loader_wait_share speaks: the unprofiled or the analysed ones.",
         lambda window: "the analysed steps" if measure_plain_wait(window) is None else "the unprofiled steps"),
    fact_of(loader_in_process, "bool"),
    fact("loader_prefetch_factor", "count", "Batches that each worker process of the DataLoader prepares ahead; 0 without workers.",
         lambda window: (0 if (settings := require_known(_find_loader_settings(window), _NO_SETTINGS)).num_workers == 0
                         else DEFAULT_PREFETCH if settings.prefetch_factor is None else settings.prefetch_factor)),
    field_fact("loader_keeps_workers", "manifest.settings.loader.persistent_workers",
               "Whether the DataLoader keeps its worker processes between epochs (persistent_workers=True).", _NO_SETTINGS),
    field_fact("loader_pins_memory", "manifest.settings.loader.pin_memory",
               "Whether the DataLoader puts batches into pinned memory (pin_memory=True).", _NO_SETTINGS),
    fact("loader_inferred", "bool", "Whether ranges, call chains, frames of the program's own or pauses tell the waits for a batch, not "
         "torch's DataLoader.",
         lambda window: not (require_known(window.loader_waits, NO_LOADER)["name"].str.contains(LOADER_MARK).any()
                             or _list_loader_frames(window).len())),
    fact_of(loader_seen, "bool"),
    fact_of(loader_workers, "count"),
    fact_of(loader_restart_share, "share"),
    fact_of(loader_late_in_turn, "bool"),
    fact("without_loader_restarts_ns", "ns", "loader_restart_share of the analysed time.",
         lambda window: loader_restart_share(window) * window.wall_ns),
    fact_of(cores_used, "count"),
    fact_of(cores_busy_share, "share"),
    fact_of(worker_cpu_share, "share"),
    *with_share(pageable_copy_exposed_ns),
    fact("pageable_copy_bytes", "B", "Bytes copied from and to pageable host memory in copies of 64 KiB or more, within the analysed "
         "steps.", total(find_pageable_copies, "bytes")),
    fact("pageable_copy_rate", "ratio", "Rate of these copies in GB/s (1e9 bytes a second).",
         lambda window: divide_sums(find_pageable_copies(window), "bytes", "busy_ns", "no large copy from or to pageable memory")),
    fact("copies_pinned_ns", "ns", "Time saved if copies from and to pageable memory used pinned memory, beside other work: what-if "
         "copies=pinned, else pageable_copy_exposed_ns.",
         lambda window: window.what_if_ns("copies=pinned", otherwise=lambda: float(pageable_copy_exposed_ns(window)))),
    fact("small_copies_per_step", "count", "Copies to the device below 4 KiB per analysed step.", per_step(find_small_copies)),
    *with_share(cpu_tensor_cost_ns),
    *with_share(cpu_side_cost_ns),
    *with_share(pinned_copy_exposed_ns),
    fact("pinned_copy_bytes", "B", "Bytes copied to the device from pinned memory in copies of 64 KiB or more, within the analysed steps.",
         total(find_pinned_copies, "bytes")),
    fact("pinned_copy_rate", "ratio", "Rate of these copies in GB/s (1e9 bytes a second).",
         lambda window: divide_sums(find_pinned_copies(window), "bytes", "busy_ns", "no large copy from pinned memory")),
    fact_of(pinned_copies_in_line_share, "share"),
    fact("batches_overlapped_ns", "ns", "Time saved if pinned copies ran beside other work: what-if copies=overlapped, at most the time "
         "that only they fill.",
         lambda window: min(
             exposed := float(pinned_copy_exposed_ns(window)),
             window.what_if_ns("copies=overlapped", otherwise=lambda: exposed))),
)
# fmt: on
