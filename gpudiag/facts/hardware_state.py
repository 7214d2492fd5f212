"""Facts about the state of the hardware during the steps: memory at its peak, clocks, link, errors, cores, other programs."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.telemetry import (
    device_memory_used_bytes,
    pcie_link_share_of_max,
    read_column,
    read_limit,
    read_telemetry,
    throttle_share,
)
from gpudiag.facts.window import Window
from gpudiag.hardware.device_table import load_table
from gpudiag.model.bundle import Manifest
from gpudiag.model.memory import MemoryReport
from gpudiag.model.notices import NoticeCode

_RECORD = "record with gpudiag.profile(memory=True)"


def read_memory(window: Window) -> MemoryReport:
    """Return the memory of the window; raises NotKnownError where none was recorded, or none was in use."""
    found = window.analysis.memory
    if found is None or not found.peak_bytes:
        raise NotKnownError(f"no memory was recorded: {_RECORD}")
    return found


def _measure_memory_share(window: Window, *kinds: str) -> float:
    # The memory where more than half of the peak has a use; raises NotKnownError otherwise: a share would be a guess
    found = read_memory(window)
    dark = sum(found.by_category.get(kind, 0) for kind in ("before_recording", "unknown"))
    if 2 * dark > found.peak_bytes:
        raise NotKnownError(f"what more than half of the memory is used for is not known: {_RECORD}")
    return sum(found.by_category.get(kind, 0) for kind in kinds) / found.peak_bytes


@fact("peak_memory_bytes", unit="B")
def peak_memory_bytes(window: Window) -> int:
    """Memory in use on the device at its peak within the recording, as its allocator counts."""
    return read_memory(window).peak_bytes


@fact("peak_memory_share", unit="share")
def peak_memory_share(window: Window) -> float:
    """Peak of the memory in use over the memory of the device."""
    window.require_accelerator()
    found = read_memory(window)
    if not found.capacity_bytes:
        raise NotKnownError("the memory of this device was not recorded")
    return found.peak_bytes / found.capacity_bytes


@fact("activation_share", unit="share")
def activation_share(window: Window) -> float:
    """Share of the peak in activations that the forward pass keeps for the backward pass."""
    return _measure_memory_share(window, "activations")


@fact("optimizer_state_share", unit="share")
def optimizer_state_share(window: Window) -> float:
    """Share of the peak in optimizer state."""
    return _measure_memory_share(window, "optimizer_state")


@fact("model_memory_share", unit="share")
def model_memory_share(window: Window) -> float:
    """Share of the peak in parameters, gradients and buffers."""
    return _measure_memory_share(window, "parameters", "gradients", "buffers")


@fact("fragmentation_share", unit="share")
def fragmentation_share(window: Window) -> float:
    """Share of the memory reserved by the allocator that no tensor used at the peak: (reserved - allocated) / reserved."""
    window.require_accelerator()
    found = read_memory(window).fragmentation_share
    if found is None:
        raise NotKnownError("the recording does not hold how much the allocator had reserved")
    return found


@fact("alloc_retries", unit="count")
def alloc_retries(window: Window) -> int:
    """Times that the allocator gave its cached segments back to the driver and tried again, since the process began (num_alloc_retries)."""
    window.require_accelerator()
    found = read_memory(window).retries
    if found is None:
        raise NotKnownError(f"the counters of the allocator were not recorded: {_RECORD}")
    return found


HEAT_REASONS = ("HW Slowdown", "SW Thermal Slowdown", "HW Thermal Slowdown", "HW Power Brake Slowdown")
POWER_REASONS = ("SW Power Cap", "Board Limit")
"""Reasons for lower clocks, as NVML names them (rules.md HW-01): the first are faults, the second are normal under heavy matrix work."""

HARDWARE_XIDS = frozenset({48, 63, 64, 74, 79, 92, 94, 95, 119, 120})
"""Xid errors of the hardware: ECC (48, 94, 95), row remapping (63, 64), NVLink (74), off the bus (79), many single bit errors (92), GSP
(119, 120) (NVIDIA, XID Errors). Others, such as 13, 31, 43 and 45, are usually the application's."""

_HOST_COPIES = r"HtoD|DtoH|Host To Device|Device To Host|HOST_TO_DEVICE|DEVICE_TO_HOST"


def _measure_reason_share(window: Window, reasons: tuple[str, ...]) -> float:
    """Return the largest share of the time in which one of `reasons` held: at least that of any of them."""
    throttle_share(window)  # raises where reasons were not sampled
    return max((event.share for event in read_telemetry(window).clock_events if event.reason in reasons), default=0.0)


@fact("heat_throttle_share", unit="share")
def heat_throttle_share(window: Window) -> float:
    """Part of the time in which heat, the power brake or another slow-down of the hardware held the clocks down."""
    window.require_accelerator()
    return _measure_reason_share(window, HEAT_REASONS)


@fact("power_cap_share", unit="share")
def power_cap_share(window: Window) -> float:
    """Part of the time in which the power limit held the clocks down: normal under heavy matrix work."""
    window.require_accelerator()
    return _measure_reason_share(window, POWER_REASONS)


@fact("clock_reasons_sampled", unit="bool")
def clock_reasons_sampled(window: Window) -> bool:
    """True where the reasons for lower clocks were sampled; never false: else it is not known."""
    window.require_accelerator()
    throttle_share(window)
    return True


@fact("sm_clock_share_of_rated", unit="share")
def sm_clock_share_of_rated(window: Window) -> float:
    """Median SM clock over the clock that the published peaks hold for; above 1 where the board boosts higher."""
    window.require_accelerator()
    # The clock that the device's peaks hold for (its data sheet), at most the highest that the driver allows. The highest clock of
    # GeForce boards is never reached in practice, and that of an H100 is above the clock of its published peaks
    device = window.device
    rated = device.tensor_clock_mhz or device.boost_clock_mhz
    if rated is None:
        raise NotKnownError("the clock of this device is not in the device table")
    return read_column(window, "sm_clock_mhz").median / min(rated, read_limit(window, "max_sm_clock_mhz"))


@fact("low_clock_saving_ns", unit="ns")
def low_clock_saving_ns(window: Window) -> float:
    """Time that compute-bound work would save at the rated clock: compute time x (1 - clock / rated clock) (rules.md HW-01)."""
    slower = max(0.0, 1 - float(sm_clock_share_of_rated(window)))
    return window.analysis.breakdown.buckets_ns.compute * slower


@fact("power_limit_share_of_tdp", unit="share")
def power_limit_share_of_tdp(window: Window) -> float:
    """Power limit in force over the board power of the data sheet."""
    window.require_accelerator()
    row = next((row for row in load_table().devices if row.id == window.device.id), None)
    if row is None:
        raise NotKnownError("the board power of this device is not in the device table")
    return read_limit(window, "power_limit_w") / row.chip.tdp_w


@fact("memory_clock_share_of_max", unit="share")
def memory_clock_share_of_max(window: Window) -> float:
    """Median memory clock over the highest that the device allows."""
    window.require_accelerator()
    return read_column(window, "mem_clock_mhz").median / read_limit(window, "max_mem_clock_mhz")


@fact("busy_share", unit="share")
def busy_share(window: Window) -> float:
    """Time in which the device did anything over the wall time of the analysed steps."""
    return window.busy_ns / window.wall_ns


def _find_host_copies(window: Window) -> pl.DataFrame:
    window.require_accelerator()
    return window.kernels.filter((pl.col("kind") == "memcpy") & pl.col("name").str.contains(_HOST_COPIES))


@fact("host_copy_share", unit="share")
def host_copy_share(window: Window) -> float:
    """Time in which copies between host and device ran over the wall time of the analysed steps."""
    return spans.measure_overlap(spans.build_spans(_find_host_copies(window)), window.step_spans) / window.wall_ns


@fact("slow_link_saving_ns", unit="ns")
def slow_link_saving_ns(window: Window) -> float:
    """Time that copies between host and device which nothing hides would save at the full link: exposed time x (1 - rate / best rate)."""
    return window.exposed_ns(_find_host_copies(window)) * max(0.0, 1 - float(pcie_link_share_of_max(window)))


# -- errors -----------------------------------------------------------------------------------------------------------


@fact("ecc_errors", unit="count")
def ecc_errors(window: Window) -> int:
    """Uncorrected ECC errors of the device since the recording began; consumer boards do not count them."""
    window.require_accelerator()
    return int(read_column(window, "ecc_uncorrected").max)


@fact("xid_errors", unit="count")
def xid_errors(window: Window) -> int:
    """Xid errors that the driver reported since the recording began."""
    window.require_accelerator()
    return int(read_column(window, "xid_events").max)


def _read_xids(window: Window) -> list[int]:
    found = [notice for notice in read_telemetry(window).notices if notice.code == NoticeCode.XID_ERRORS]
    return [int(number) for notice in found for number in str(notice.params["numbers"]).split()]


@fact("hardware_xid_errors", unit="count")
def hardware_xid_errors(window: Window) -> int:
    """Different Xid errors among the latest whose cause is the hardware (48, 63, 64, 74, 79, 92, 94, 95, 119, 120)."""
    return len(HARDWARE_XIDS.intersection(_read_xids(window))) if xid_errors(window) else 0


@fact("xid_numbers", unit="text")
def xid_numbers(window: Window) -> str:
    """Numbers of the latest Xid errors, such as 'Xid 79, Xid 31'; 'none'."""
    xid_errors(window)
    return ", ".join(f"Xid {number}" for number in _read_xids(window)) or "none"


# -- cores ------------------------------------------------------------------------------------------------------------


def _read_manifest(window: Window) -> Manifest:
    found = window.analysis.manifest
    if found is None:
        raise NotKnownError("a trace does not hold the threads and cores of the run: record with gpudiag.profile or gpudiag run")
    return found


@fact("usable_cores", unit="count")
def usable_cores(window: Window) -> float:
    """Cores that the run may use: those of the machine, or fewer where its control group grants less time."""
    machine = _read_manifest(window).machine
    if machine.cpu_cores is None:
        raise NotKnownError("the number of cores was not recorded")
    return min(float(machine.cpu_cores), machine.cpu_quota or float("inf"))


@fact("cpu_threads", unit="count")
def cpu_threads(window: Window) -> int:
    """Threads that this rank keeps busy: those of torch's kernels and one for each loader worker; other ranks are not counted."""
    settings = _read_manifest(window).settings
    if settings.threads is None:
        raise NotKnownError("the number of threads of torch was not recorded")
    return settings.threads + (settings.loader.num_workers if settings.loader else 0)


@fact("core_oversubscription", unit="ratio")
def core_oversubscription(window: Window) -> float:
    """cpu_threads over usable_cores: above 1 threads wait for cores."""
    return float(cpu_threads(window)) / max(float(usable_cores(window)), 0.01)


@fact("alone_in_run", unit="bool")
def alone_in_run(window: Window) -> bool:
    """Whether the run has one rank: with several, what looks like other programs are the other ranks."""
    return _read_manifest(window).world_size <= 1


# -- sharing ----------------------------------------------------------------------------------------------------------


@fact("foreign_memory_bytes", unit="B")
def foreign_memory_bytes(window: Window) -> float:
    """Device memory in use beyond what this process's allocator had reserved at its peak: context, libraries and other programs."""
    window.require_accelerator()
    used, reserved = float(device_memory_used_bytes(window)), read_memory(window).reserved_peak_bytes
    if reserved is None:
        raise NotKnownError("how much memory this process had reserved was not recorded: record with gpudiag.profile(memory=True)")
    return max(0.0, used - reserved)


@fact("gpu_partitioned", unit="bool")
def gpu_partitioned(window: Window) -> bool:
    """Whether the device is a part of a board: an instance of NVIDIA MIG, told by its name or by NVML."""
    window.require_accelerator()
    names = [device.name for device in window.analysis.trace.meta.devices]
    if any("MIG" in name for name in names):
        return True
    found = window.analysis.telemetry
    require(found is not None or any(names), "neither telemetry nor the name of the device was recorded")
    return found is not None and any(notice.code == NoticeCode.BOARD_SHARED for notice in found.notices)


@fact("gpu_util_share", unit="share")
def gpu_util_share(window: Window) -> float:
    """Median of NVML's GPU utilisation: the part of the driver's sample period in which any kernel ran, however small."""
    window.require_accelerator()
    value = read_column(window, "gpu_util_pct").median / 100
    require(0 <= value <= 1, "an implausible utilisation")
    return value
