"""Devices built from the table: a row as it is, a row cut to fewer SMs or less memory, or an architecture's rates alone."""

from __future__ import annotations

import re
import statistics

import msgspec

from gpudiag.hardware.evidence import evidence, is_capability
from gpudiag.hardware.names import DeviceName
from gpudiag.hardware.table import Links, Row, Table
from gpudiag.model.hardware import Device, ObservedDevice

GPU_LAUNCH_FLOOR_NS = 2000.0
"""A kernel shorter than about 2 us cannot be judged by a roofline: the time of an empty kernel on current GPUs, rounded up."""

VECTOR = ("fp32", "fp64")
"""Peaks of the vector units; all others are those of the matrix units."""


def device_from_row(row: Row, table: Table) -> Device:
    """Return the device of a row with its published peaks."""
    chip, memory = row.chip, row.memory
    return Device(
        id=row.id,
        name=row.name,
        kind="gpu",
        provenance=row.provenance.confidence,
        source=f"device table, row {row.id}: {'; '.join(table.sources[key].title.split(' (')[0] for key in row.provenance.sources)}",
        vendor=chip.vendor,
        architecture=chip.architecture,
        compute_capability=chip.compute_capability,
        sm_count=chip.sm_count,
        boost_clock_mhz=chip.boost_clock_mhz,
        tensor_clock_mhz=chip.tensor_clock_mhz,
        memory_bytes=memory.bytes,
        bandwidth_byte_per_s=memory.gbyte_per_s * 1e9,
        cache_bytes=memory.cache_bytes,
        peaks={dtype: tflops * 1e12 for dtype, tflops in row.peaks_tflop_per_s.items()},
        pcie_byte_per_s=_host_byte_per_s(row.links, table),
        link_byte_per_s=None if row.links.peer_gbyte_per_s is None else row.links.peer_gbyte_per_s * 1e9,
        launch_floor_ns=GPU_LAUNCH_FLOOR_NS,
        notes=_notes(row),
    )


def _host_byte_per_s(links: Links, table: Table) -> float | None:
    if links.host_gbyte_per_s is not None:
        return links.host_gbyte_per_s * 1e9
    return None if links.pcie_gen is None else table.pcie_gbyte_per_s[links.pcie_gen] * 1e9


def _notes(row: Row) -> tuple[str, ...]:
    weak = row.provenance.unverified
    return (*row.notes, f"Not verified: {', '.join(weak)}.") if weak else row.notes


def fit(device: Device, row: Row, observed: ObservedDevice, name: DeviceName) -> tuple[Device, tuple[str, ...]]:
    """Return the row's device as it was recorded (cut SMs, partition, other memory), and a warning for each change."""
    share = _sm_share(row, observed, name)
    memory_bytes = observed.memory_bytes or (name.mig_gib * 2**30 if name.mig_gib else None)
    warnings: tuple[str, ...] = ()
    if share is not None:
        device, warnings = _cut(device, row, share, observed)
    if memory_bytes is None:
        return device, warnings
    fits = evidence(row, msgspec.structs.replace(observed, memory_bytes=memory_bytes)).memory
    if not fits and not name.vgpu:
        device, warning = _other_memory(device, row, memory_bytes, partition=share is not None and share < 1)
        warnings += (warning,)
    return msgspec.structs.replace(device, memory_bytes=memory_bytes), warnings


def _sm_share(row: Row, observed: ObservedDevice, name: DeviceName) -> float | None:
    """Return the share of the full part's SMs; None: all of them, or not recorded."""
    if observed.sm_count is not None:
        return None if observed.sm_count == row.chip.sm_count else observed.sm_count / row.chip.sm_count
    # A MIG instance ng.* owns n of 7 compute slices (NVIDIA MIG user guide); slices hold slightly less than a seventh of all SMs.
    return min(1.0, name.mig_slices / 7) if name.mig_slices else None


def _cut(device: Device, row: Row, share: float, observed: ObservedDevice) -> tuple[Device, tuple[str, ...]]:
    sms = observed.sm_count if observed.sm_count is not None else round(row.chip.sm_count * share)
    device = msgspec.structs.replace(
        device,
        name=f"{row.name}, {sms} of {row.chip.sm_count} SMs" if share < 1 else f"{row.name}, {sms} SMs",
        provenance="derived",
        source=f"{device.source}; peaks scaled by SM count {sms} / {row.chip.sm_count}",
        sm_count=sms,
        peaks={dtype: peak * share for dtype, peak in device.peaks.items()},
        link_byte_per_s=None,
    )
    why = "a partition or another part; peaks are scaled by the SM count, the peer link is unknown"
    return device, (f"{sms} SMs, {row.name} has {row.chip.sm_count}: {why}",)


def _other_memory(device: Device, row: Row, memory_bytes: int, *, partition: bool) -> tuple[Device, str]:
    """Return the device with the bandwidth of its memory slices, or without one where the board carries other memory."""
    recorded = f"{memory_bytes / 2**30:.3g} GiB of memory recorded, {row.name} has {row.memory.gib:g} GiB"
    eighths = round(8 * memory_bytes / row.memory.bytes)
    if not partition or not 1 <= eighths < 8 or device.bandwidth_byte_per_s is None:
        changed = msgspec.structs.replace(device, bandwidth_byte_per_s=None)
        return changed, f"{recorded}: another board, its bandwidth is unknown"
    # MIG and AMD memory partitions own whole eighths of the DRAM channels and of the cache (NVIDIA MIG user guide; A30: quarters).
    changed = msgspec.structs.replace(
        device,
        bandwidth_byte_per_s=device.bandwidth_byte_per_s * eighths / 8,
        cache_bytes=round(row.memory.cache_bytes * eighths / 8),
    )
    return changed, f"{recorded}: bandwidth and cache of {eighths}/8 of it are assumed"


def device_from_rates(observed: ObservedDevice, name: DeviceName, table: Table) -> Device | str:
    """Return a device whose peaks are SMs x FLOP per clock x an assumed clock, or the reason why nothing can be derived."""
    if observed.sm_count is None or observed.compute_capability is None:
        missing = "SM count" if observed.sm_count is None else "compute capability"
        return f"the {missing} is not recorded, so that no peak can be derived"
    key = _rates_key(observed, name, table)
    if key is None:
        return f"no rates are known for compute capability {observed.compute_capability[:20]!r}"
    same = [row.chip for row in table.devices if row.chip.rates == key]
    boost = statistics.median(chip.boost_clock_mhz for chip in same)
    tensor = statistics.median(chip.tensor_clock_mhz or chip.boost_clock_mhz for chip in same)
    clocks = {dtype: boost if dtype in VECTOR else tensor for dtype in table.rates[key]}
    label = name.text or f"{key} with {observed.sm_count} SMs"
    return Device(
        id=f"unknown-{re.sub(r'[^a-z0-9]+', '-', label.lower()).strip('-')}",
        name=label,
        kind="gpu",
        provenance="derived",
        source=f"SM count x {key} rates x {boost:g} MHz (matrix units {tensor:g} MHz), the median {key} clock in the device table",
        vendor=same[0].vendor,
        architecture=same[0].architecture,
        compute_capability=same[0].compute_capability,
        sm_count=observed.sm_count,
        boost_clock_mhz=boost,
        tensor_clock_mhz=tensor if tensor != boost else None,
        memory_bytes=observed.memory_bytes,
        peaks={dtype: float(rate * observed.sm_count * clocks[dtype] * 1e6) for dtype, rate in table.rates[key].items()},
        launch_floor_ns=GPU_LAUNCH_FLOOR_NS,
        notes=("The clock is assumed, not known.",),
    )


def _rates_key(observed: ObservedDevice, name: DeviceName, table: Table) -> str | None:
    """Return the row of `table.rates` for this chip; None where there is none or several chips share the recorded number."""
    recorded = observed.compute_capability or ""
    for key in table.rates:
        amd = key.startswith("gfx")
        if name.vendor not in (None, "amd" if amd else "nvidia") or observed.warp_size not in (None, 64 if amd else 32):
            continue
        if key in table.ambiguous_rates and not recorded.lower().startswith("gfx"):
            continue
        if not key.endswith("_geforce") and is_capability(_capability(key), recorded):
            return f"{key}_geforce" if name.geforce and f"{key}_geforce" in table.rates else key
    return None


def _capability(key: str) -> str:
    digits = key.removeprefix("sm_")
    return key if key.startswith("gfx") else f"{digits[:-1]}.{digits[-1]}"
