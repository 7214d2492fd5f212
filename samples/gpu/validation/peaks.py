"""`gpudiag calibrate` against the device table: matrix products, DRAM, launch floor, host copies."""

from __future__ import annotations

from gpudiag import api
from gpudiag.hardware.device_peaks import build_device
from gpudiag.hardware.device_table import load_table
from gpudiag.model.hardware import Device
from gpudiag.units import format_ns, format_rate, format_share
from validation.rows import Job

OVER = 1.03
"""More than this above a data sheet: the entry is wrong, not the hardware (gpudiag.model.ops.OVER_ROOF_ABOVE)."""

PRODUCTS, STREAMS, LINK = 0.5, 0.8, 0.5
"""At least so much of a published rate. Products reach 0.6 to 0.9 of it where power allows, streams 0.85 to 0.93 (devices.yaml), PCIe
loses a tenth to half of its rate to packets and the host's memory."""

FLOOR_NS = (300.0, 10_000.0)
"""A kernel of one element: about 1 to 5 us on data-centre GPUs."""


def run(job: Job) -> None:
    """Measure, keep the figures for later reports, and hold them against the table."""
    measured = api.calibrate(job.device)
    table = next((row for row in load_table().devices if row.id == measured.id), None)
    judge(job, measured, None if table is None else build_device(table, load_table()))


def judge(job: Job, measured: Device, table: Device | None) -> None:
    """Keep a row for each figure; only told where the table does not hold it."""
    published = {} if table is None else table.peaks
    notes = [note for note in measured.notes if note.startswith("Not measured")]
    taken_over = {key for note in notes for key in note.partition(": ")[2].rstrip(".").split(", ")}
    for key, rate in measured.peaks.items():
        if key in taken_over:
            job.not_run(f"{key} products", "torch has no such product here; reports take the table's figure")
        else:
            _rate(job, f"{key} products", rate, published.get(key), "FLOP", PRODUCTS)
    _rate(job, "DRAM, best of copy, sum, add", measured.bandwidth_byte_per_s, table and table.bandwidth_byte_per_s, "B", STREAMS)
    if measured.cache_bandwidth_byte_per_s is not None:
        faster = measured.cache_bandwidth_byte_per_s / (measured.bandwidth_byte_per_s or 1.0)
        job.add("cache is faster than DRAM", "above x1", f"x{faster:.2f}", faster > 1)
    for name, rate in measured.host_copy_byte_per_s.items():
        _rate(job, f"copy {name}", rate, table and table.pcie_byte_per_s, "B", LINK if "pinned" in name else 0.0)
    _floor(job, measured)
    for note in measured.notes:
        job.add("note of gpudiag calibrate", "-", note, None)


def _rate(job: Job, claim: str, rate: float | None, known: float | None, unit: str, least: float) -> None:
    if rate is None:
        return job.not_run(claim, "it was not measured on this device")
    if known is None:
        return job.add(claim, "not in the device table", format_rate(rate, unit), None)
    expected = f"{format_share(least)} to {format_share(OVER)} of {format_rate(known, unit)}"
    return job.add(claim, expected, f"{format_rate(rate, unit)} ({format_share(rate / known)})", least <= rate / known <= OVER)


def _floor(job: Job, measured: Device) -> None:
    floor = measured.launch_floor_ns
    if floor is None:
        return job.not_run("launch floor", "it was not measured on this device")
    low, high = FLOOR_NS
    expected, holds = f"{format_ns(low)} to {format_ns(high)}", low <= floor <= high
    return job.add("launch floor", expected if job.on_gpu else "-", format_ns(floor), holds if job.on_gpu else None)
