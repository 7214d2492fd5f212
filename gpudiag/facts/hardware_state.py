"""Facts about the state of the hardware during the steps: memory at its peak, clocks, link, errors, cores, other programs."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.facts.registry import fact, fact_of, gpu_only, known, raise_unknown, require, require_known
from gpudiag.facts.telemetry import NOT_SAMPLED, pcie_link_share_of_max, read_column, read_limit, read_telemetry, throttle_share
from gpudiag.facts.window import Window, copies
from gpudiag.hardware.device_table import load_table
from gpudiag.model.notices import NoticeCode
from gpudiag.timeline.history import MIN_STEPS, SETTLED_AFTER

_RECORD = "record with gpudiag.profile(memory=True)"
NO_COUNTERS = f"the counters of the allocator were not recorded: {_RECORD}"
NO_CAPACITY = "the memory of this device was not recorded"
NOTHING_RESERVED = f"how much memory this process had reserved was not recorded: {_RECORD}"
NO_RESERVE = "the recording does not hold how much the allocator had reserved"


read_memory = known(
    lambda window: memory if (memory := window.analysis.memory) is not None and memory.peak_bytes else None,
    f"no memory was recorded: {_RECORD}",
)
"""Reads the memory of the window, of which some was in use."""

_read_manifest = known(
    lambda window: window.analysis.manifest,
    "a trace does not hold the threads and cores of the run: record with gpudiag.profile or gpudiag run",
)


def measure_memory_share(window: Window, *uses: str) -> float:
    """Return the share of the peak in these uses; not known where more than half of it has none: it would be a guess."""
    found = read_memory(window)
    dark = sum(found.by_category.get(use, 0) for use in ("before_recording", "unknown"))
    require(2 * dark <= found.peak_bytes, f"what more than half of the memory is used for is not known: {_RECORD}")
    return sum(found.by_category.get(use, 0) for use in uses) / found.peak_bytes


HEAT_REASONS = ("HW Slowdown", "SW Thermal Slowdown", "HW Thermal Slowdown", "HW Power Brake Slowdown")
POWER_REASONS = ("SW Power Cap", "Board Limit")
"""Reasons for lower clocks, as NVML names them (rules.md HW-01): the first are faults, the second are normal under heavy matrix work."""

HARDWARE_XIDS = frozenset({48, 63, 64, 74, 79, 92, 94, 95, 119, 120})
"""Xid errors of the hardware: ECC (48, 94, 95), row remapping (63, 64), NVLink (74), off the bus (79), many single bit errors (92), GSP
(119, 120) (NVIDIA, XID Errors). Others, such as 13, 31, 43 and 45, are usually the application's."""

find_host_copies = copies(r"HtoD|DtoH|Host To Device|Device To Host|HOST_TO_DEVICE|DEVICE_TO_HOST")


def measure_held_share(window: Window, reasons: tuple[str, ...]) -> float:
    """Return the largest share of the time in which one of `reasons` held clocks down: at least that of any of them."""
    window.require_accelerator()
    throttle_share(window)  # raises where reasons were not sampled
    return max((event.share for event in read_telemetry(window).clock_events if event.reason in reasons), default=0.0)


def sm_clock_share_of_rated(window: Window) -> float:
    """Median SM clock over the clock that the published peaks hold for; above 1 where the board boosts higher."""
    window.require_accelerator()
    # The clock that the device's peaks hold for (its data sheet), at most the highest that the driver allows. The highest clock of
    # GeForce boards is never reached in practice, and that of an H100 is above the clock of its published peaks
    device = window.device
    rated = require_known(device.tensor_clock_mhz or device.boost_clock_mhz, "the clock of this device is not in the device table")
    return read_column(window, "sm_clock_mhz").median / min(rated, read_limit(window, "max_sm_clock_mhz"))


def power_limit_share_of_tdp(window: Window) -> float:
    """Power limit in force over the board power of the data sheet."""
    window.require_accelerator()
    row = next((row for row in load_table().devices if row.id == window.device.id), None)
    board_w = require_known(row.chip.tdp_w if row else None, "the board power of this device is not in the device table")
    return read_limit(window, "power_limit_w") / board_w


def _read_xids(window: Window) -> list[int]:
    """Return the numbers of the latest Xid errors; raises NotKnownError where they were not sampled."""
    window.require_accelerator()
    read_column(window, "xid_events")
    found = [notice for notice in read_telemetry(window).notices if notice.code == NoticeCode.XID_ERRORS]
    return [int(number) for notice in found for number in str(notice.params["numbers"]).split()]


def usable_cores(window: Window) -> float:
    """Cores that the run may use: those of the machine, or fewer where its control group grants less time."""
    machine = _read_manifest(window).machine
    return min(float(require_known(machine.cpu_cores, "the number of cores was not recorded")), machine.cpu_quota or float("inf"))


def cpu_threads(window: Window) -> int:
    """Threads that this rank keeps busy: those of torch's kernels and of the loader's workers; other ranks are not counted."""
    loader = _read_manifest(window).settings.loader
    return torch_threads(window) + (loader.num_workers * (_count_worker_threads(window) or 1) if loader else 0)


def _count_worker_threads(window: Window) -> int | None:
    sampled = window.analysis.telemetry
    column = sampled.columns.get("child_threads") if sampled else None
    return None if column is None else round(column.median)


SHARED_OP_NS = 100_000
"""Time of an op on a CPU from which on more threads shorten it (heuristic: some ten times what starting them takes)."""


def idle_cores_saving_ns(window: Window) -> float:
    """Time that ops of 0.1 ms and more on a CPU would save if all usable cores shared them as its threads do."""
    require(window.on_cpu, "only for runs without an accelerator")
    long = window.kernels.filter(pl.col("time_ns") >= SHARED_OP_NS)
    return float(long["time_ns"].sum()) * max(0.0, 1 - torch_threads(window) / usable_cores(window))


def torch_threads(window: Window) -> int:
    """Threads of torch's kernels on the CPU."""
    return require_known(_read_manifest(window).settings.threads, "the number of threads of torch was not recorded")


def gpu_partitioned(window: Window) -> bool:
    """Whether the device is a part of a board: an instance of NVIDIA MIG, told by its name or by NVML."""
    window.require_accelerator()
    names = [device.name for device in window.analysis.trace.meta.devices]
    if any("MIG" in name for name in names):
        return True
    found = window.analysis.telemetry
    require(found is not None or any(names), "neither telemetry nor the name of the device was recorded")
    return found is not None and any(notice.code == NoticeCode.BOARD_SHARED for notice in found.notices)


LOAD_NS = 4 * 10**9
"""Loads are means over this time: that of child processes is known once a second, and late."""

OTHERS_BUSY = 0.2
"""Share of the CPUs that others take from which times of the host may be theirs (heuristic)."""


def slowed_by_others_share(window: Window) -> float:
    """How much longer the median unprofiled step was while other programs kept a fifth of the CPUs busy than while they did not; 0 where
    fewer than 10 steps of either kind show nothing.

    A step has the load of the four seconds before the first sample after it. With several ranks the others are ranks.
    """
    cpus, samples = read_limit(window, "cpus"), require_known(window.analysis.samples, NOT_SAMPLED)
    records = require_known(window.analysis.step_records, NOT_SAMPLED).filter(pl.col("step") >= SETTLED_AFTER, window="plain")
    steps = records.select("wall_ns", t_ns=pl.col("start_unix_ns") + pl.col("wall_ns")).sort("t_ns")
    for column in ("system_cpu_util_pct", "cpu_util_pct"):
        load = samples.select("t_ns", pl.col(column)).drop_nulls().sort("t_ns")
        load = load.with_columns(pl.col(column).rolling_mean_by("t_ns", f"{LOAD_NS}i"))
        steps = steps.join_asof(load, on="t_ns", strategy="forward", tolerance=LOAD_NS)
    busy = pl.col("system_cpu_util_pct") - pl.col("cpu_util_pct") / cpus >= 100 * OTHERS_BUSY
    slow, calm = (steps.filter(chosen)["wall_ns"] for chosen in (busy, ~busy))
    if min(len(slow), len(calm)) < MIN_STEPS:
        return 0.0
    return max(0.0, float(slow.median()) / float(calm.median()) - 1)  # type: ignore[arg-type]


# fmt: off
FACTS = (
    fact("peak_memory_share", "share", "Peak of the memory in use over the memory of the device.",
         gpu_only(lambda window: (read_memory(window).peak_bytes
                                  / require_known(read_memory(window).capacity_bytes or None, NO_CAPACITY)))),
    fact("activation_share", "share", "Share of the peak in activations that the forward pass keeps for the backward pass.",
         lambda window: measure_memory_share(window, "activations")),
    fact("optimizer_state_share", "share", "Share of the peak in optimizer state.",
         lambda window: measure_memory_share(window, "optimizer_state")),
    fact("alloc_retries", "count", "Times that the allocator gave its cached segments back to the driver and tried again, since the "
         "process began (num_alloc_retries).", gpu_only(lambda window: require_known(read_memory(window).retries, NO_COUNTERS))),
    fact("heat_throttle_share", "share", "Part of the time in which heat, the power brake or another slow-down of the hardware held the "
         "clocks down.", lambda window: measure_held_share(window, HEAT_REASONS)),
    fact("power_cap_share", "share", "Part of the time in which the power limit held the clocks down: normal under heavy matrix work.",
         lambda window: measure_held_share(window, POWER_REASONS)),
    fact_of(sm_clock_share_of_rated, "share"),
    fact("low_clock_saving_ns", "ns", "Time that compute-bound work would save at the rated clock: compute time x (1 - clock / rated "
         "clock) (rules.md HW-01).",
         lambda window: window.analysis.breakdown.buckets_ns.compute * max(0.0, 1 - sm_clock_share_of_rated(window))),
    fact_of(power_limit_share_of_tdp, "share"),
    fact("busy_share", "share", "Time in which the device did anything over the wall time of the analysed steps.",
         lambda window: window.busy_ns / window.wall_ns),
    fact("host_copy_share", "share", "Time in which copies between host and device ran over the wall time of the analysed steps.",
         lambda window: spans.measure_overlap(spans.build_spans(find_host_copies(window)), window.step_spans) / window.wall_ns),
    fact("slow_link_saving_ns", "ns", "Time that copies between host and device which nothing hides would save at the full link: exposed "
         "time x (1 - rate / best rate).",
         lambda window: window.exposed_ns(find_host_copies(window)) * max(0.0, 1 - pcie_link_share_of_max(window))),
    fact("ecc_errors", "count", "Uncorrected ECC errors of the device since the recording began; consumer boards do not count them.",
         gpu_only(lambda window: int(read_column(window, "ecc_uncorrected").max))),
    fact("xid_errors", "count", "Xid errors that the driver reported since the recording began.",
         gpu_only(lambda window: int(read_column(window, "xid_events").max))),
    fact("hardware_xid_errors", "count", "Different Xid errors among the latest whose cause is the hardware (48, 63, 64, 74, 79, 92, 94, "
         "95, 119, 120).",
         gpu_only(lambda window: len(HARDWARE_XIDS.intersection(_read_xids(window)))
                                 if int(read_column(window, "xid_events").max) else 0)),
    fact("xid_numbers", "text", "Numbers of the latest Xid errors, such as 'Xid 79, Xid 31'; 'none'.",
         lambda window: ", ".join(f"Xid {number}" for number in _read_xids(window)) or "none"),
    fact_of(usable_cores, "count"),
    fact_of(cpu_threads, "count"),
    fact("loader_worker_threads", "count", "Threads that compute in the loader's busiest worker process: torch's is one there, those of "
         "BLAS, OpenMP or OpenCV are one for each core unless they are told.",
         lambda window: require_known(_count_worker_threads(window), "no worker process computed for half a second when it was looked at")),
    fact_of(torch_threads, "count"),
    fact_of(idle_cores_saving_ns, "ns"),
    fact("threads_by_environment", "bool", "Whether the environment sets the number of threads (OMP_NUM_THREADS, MKL_NUM_THREADS).",
         lambda window: any(f"{library}_NUM_THREADS" in require_known(_read_manifest(window).program, NOT_SAMPLED).variables
                            for library in ("OMP", "MKL"))),
    fact("core_oversubscription", "ratio", "cpu_threads over usable_cores: above 1 threads wait for cores.",
         lambda window: cpu_threads(window) / max(usable_cores(window), 0.01)),
    fact("alone_in_run", "bool", "Whether the run has one rank: with several, what looks like other programs are the other ranks.",
         lambda window: _read_manifest(window).world_size <= 1),
    fact_of(slowed_by_others_share, "share"),
    fact("foreign_memory_bytes", "B", "Device memory in use beyond what this process's allocator had reserved at its peak: context, "
         "libraries and other programs.",
         gpu_only(lambda window: max(0.0, read_column(window, "mem_used_bytes").max
                                     - require_known(read_memory(window).reserved_peak_bytes, NOTHING_RESERVED)))),
    fact_of(gpu_partitioned, "bool"),
    fact("gpu_util_share", "share", "Median of NVML's GPU utilisation: the part of the driver's sample period in which any kernel ran, "
         "however small.",
         gpu_only(lambda window: value if 0 <= (value := read_column(window, "gpu_util_pct").median / 100) <= 1
                                 else raise_unknown("an implausible utilisation"))),
)
# fmt: on
