"""Which device a recording was made on, and its peaks: from the table, cut to what was recorded, at the clock that it ran at."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

import msgspec
import polars as pl

from gpudiag.hardware.device_table import (
    DeviceName,
    Row,
    Table,
    compare_evidence,
    cut_text,
    is_capability,
    is_device_name,
    load_table,
    parse_device_name,
)
from gpudiag.model.hardware import SCALED_PEAKS, Device, ObservedDevice
from gpudiag.model.notices import Notice, NoticeCode, Param, make_notice

GPU_LAUNCH_FLOOR_NS = 2000.0
"""A kernel shorter than about 2 us cannot be judged by a roofline: the time of an empty kernel on current GPUs, rounded up."""

SPECIAL_PER_CLOCK = 16
"""Results of the special function units per clock and SM or CU: exp2, log2, sin, cos, reciprocal (NVIDIA CUDA C++ Programming Guide,
throughput of native arithmetic instructions, compute capability 7.x to 12.0); four SIMDs of 16 lanes at a quarter of the rate (AMD CDNA3
ISA guide)."""

VECTOR_PEAKS = ("fp32", "fp64")
"""Peaks of the vector units; all others are those of the matrix units."""


def build_device(row: Row, table: Table) -> Device:
    """Return the device of a row with its published peaks."""
    chip, memory = row.chip, row.memory
    host_gbyte_per_s = row.links.host_gbyte_per_s
    if host_gbyte_per_s is None and row.links.pcie_gen is not None:
        host_gbyte_per_s = table.pcie_gbyte_per_s[row.links.pcie_gen]
    host_byte_per_s = None if host_gbyte_per_s is None else host_gbyte_per_s * 1e9
    weak = row.provenance.unverified
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
        special_per_s=chip.sm_count * SPECIAL_PER_CLOCK * chip.boost_clock_mhz * 1e6,
        attained={dtype: tflops * 1e12 for dtype, tflops in row.attained_tflop_per_s.items()},
        pcie_byte_per_s=host_byte_per_s,
        link_byte_per_s=None if row.links.peer_gbyte_per_s is None else row.links.peer_gbyte_per_s * 1e9,
        launch_floor_ns=GPU_LAUNCH_FLOOR_NS,
        notes=(*row.notes, f"Not verified: {', '.join(weak)}.") if weak else row.notes,
    )


def fit_device(device: Device, row: Row, observed: ObservedDevice, name: DeviceName) -> tuple[Device, tuple[Notice, ...]]:
    """Return the row's device as it was recorded (cut SMs, partition, other memory), and a notice for each change."""
    share: float | None = None  # of the full part's SMs; None: all of them, or not recorded
    if observed.sm_count is not None and observed.sm_count != row.chip.sm_count:
        share = observed.sm_count / row.chip.sm_count
    elif observed.sm_count is None and name.mig_slices:
        # A MIG instance ng.* owns n of 7 compute slices (NVIDIA MIG user guide); slices hold slightly less than a seventh of all SMs.
        share = min(1.0, name.mig_slices / 7)
    notices: tuple[Notice, ...] = ()
    if share is not None:
        sms = observed.sm_count if observed.sm_count is not None else round(row.chip.sm_count * share)
        device = msgspec.structs.replace(
            device,
            name=f"{row.name}, {sms} of {row.chip.sm_count} SMs" if share < 1 else f"{row.name}, {sms} SMs",
            provenance="derived",
            source=f"{device.source}; peaks scaled by SM count {sms} / {row.chip.sm_count}",
            sm_count=sms,
            peaks={dtype: peak * share for dtype, peak in device.peaks.items()},
            special_per_s=device.special_per_s * share if device.special_per_s else None,
            attained={dtype: rate * share for dtype, rate in device.attained.items()},
            link_byte_per_s=None,
        )
        notices = (make_notice(NoticeCode.DEVICE_SM_COUNT, sms=sms, device=row.name, full_sms=row.chip.sm_count),)
    memory_bytes = observed.memory_bytes or (name.mig_gib * 2**30 if name.mig_gib else None)
    if memory_bytes is None:
        return device, notices
    fits = compare_evidence(row, msgspec.structs.replace(observed, memory_bytes=memory_bytes)).memory
    if not fits and not name.vgpu:
        sizes: dict[str, Param] = {"recorded_gib": memory_bytes / 2**30, "device": row.name, "full_gib": row.memory.gib}
        eighths = round(8 * memory_bytes / row.memory.bytes)
        if share is not None and share < 1 and 1 <= eighths < 8 and device.bandwidth_byte_per_s is not None:
            # MIG and AMD memory partitions own whole eighths of the DRAM channels and of the cache (NVIDIA MIG user guide; A30: quarters).
            bandwidth, cache_bytes = device.bandwidth_byte_per_s * eighths / 8, round((row.memory.cache_bytes or 0) * eighths / 8) or None
            device = msgspec.structs.replace(device, bandwidth_byte_per_s=bandwidth, cache_bytes=cache_bytes)
            notices += (make_notice(NoticeCode.DEVICE_MEMORY_SLICES, eighths=eighths, **sizes),)
        else:  # the board carries other memory
            device = msgspec.structs.replace(device, bandwidth_byte_per_s=None)
            notices += (make_notice(NoticeCode.DEVICE_MEMORY_OTHER, **sizes),)
    return msgspec.structs.replace(device, memory_bytes=memory_bytes), notices


def build_device_from_rates(observed: ObservedDevice, name: DeviceName, table: Table) -> Device | str:
    """Return a device whose peaks are SMs x FLOP per clock x an assumed clock, or the reason why nothing can be derived."""
    if observed.sm_count is None or observed.compute_capability is None:
        missing = "SM count" if observed.sm_count is None else "compute capability"
        return f"the {missing} is not recorded, so that no peak can be derived"
    key = _find_rates_key(observed, name, table)
    if key is None:
        return f"no rates are known for compute capability {observed.compute_capability[:20]!r}"
    same = [row.chip for row in table.devices if row.chip.rates == key]
    boost = statistics.median(chip.boost_clock_mhz for chip in same)
    tensor = statistics.median(chip.tensor_clock_mhz or chip.boost_clock_mhz for chip in same)
    clocks = {dtype: boost if dtype in VECTOR_PEAKS else tensor for dtype in table.rates[key]}
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
        special_per_s=observed.sm_count * SPECIAL_PER_CLOCK * boost * 1e6,
        launch_floor_ns=GPU_LAUNCH_FLOOR_NS,
        notes=("The clock is assumed, not known.",),
    )


def _find_rates_key(observed: ObservedDevice, name: DeviceName, table: Table) -> str | None:
    recorded = observed.compute_capability or ""
    for key in table.rates:
        amd = key.startswith("gfx")
        if name.vendor not in (None, "amd" if amd else "nvidia") or observed.warp_size not in (None, 64 if amd else 32):
            continue
        if key in table.ambiguous_rates and not recorded.lower().startswith("gfx"):
            continue
        digits = key.removeprefix("sm_")
        capability = key if amd else f"{digits[:-1]}.{digits[-1]}"
        if not key.endswith("_geforce") and is_capability(capability, recorded):
            return f"{key}_geforce" if name.geforce and f"{key}_geforce" in table.rates else key
    return None


# Below this difference it does not matter which of two devices it is: streaming kernels reach 85-93 % of a bandwidth anyway.
_ALIKE = 0.06
_TRUST = {"datasheet": 0, "derived": 1, "unverified": 2}


class Resolution(msgspec.Struct, frozen=True):
    """The device of a recording (None: unknown, the last notice says why) and what the reader should know about the choice."""

    device: Device | None
    notices: tuple[Notice, ...] = ()


class _Choice(msgspec.Struct, frozen=True):
    row: Row
    others: tuple[Row, ...] = ()
    notice: Notice | None = None


def resolve_device(observed: ObservedDevice) -> Resolution:
    """Return the device that `observed` describes: a row of the table, as it is or cut to what was recorded, or one derived."""
    changes = {key: None for key in ("sm_count", "memory_bytes", "warp_size") if (getattr(observed, key) or 0) <= 0}
    observed = msgspec.structs.replace(observed, compute_capability=observed.compute_capability or None, **changes)
    name, table = parse_device_name(observed.name), load_table()
    choice = _match_by_name(observed, name, table) or _match_by_evidence(observed, name, table)
    if choice is None:
        derived = build_device_from_rates(observed, name, table)
        if isinstance(derived, str):
            return Resolution(None, (make_notice(NoticeCode.DEVICE_UNDERIVABLE, recorded=name.label, reason=derived),))
        return Resolution(derived, (make_notice(NoticeCode.DEVICE_DERIVED, recorded=name.label, source=derived.source),))
    # What the rows that fit as well leave open: links that differ are unknown, peaks that differ unverified
    device = build_device(choice.row, table)
    others = [build_device(row, table) for row in choice.others]
    links = ("pcie_byte_per_s", "link_byte_per_s")
    unsure = {key: None for key in links if any(getattr(other, key) != getattr(device, key) for other in others)}
    device = msgspec.structs.replace(device, **unsure)
    notices = [] if choice.notice is None else [choice.notice]
    differing = [other for other in others if _measure_difference(device, other) > 0]
    if differing:
        figures = [
            f"{one.name} (fp16 {one.peaks['fp16'] / 1e12:g} TFLOP/s, {(one.bandwidth_byte_per_s or 0) / 1e9:g} GB/s)"
            for one in (device, *differing[:3])
        ]
        notices.append(make_notice(NoticeCode.DEVICE_AMBIGUOUS, device=figures[0], others=", ".join(figures[1:])))
    if any(_measure_difference(device, other) > _ALIKE for other in differing):
        device = msgspec.structs.replace(device, provenance="unverified")
    device, adjusted = fit_device(device, choice.row, observed, name)
    return Resolution(device, (*notices, *adjusted))


def _match_by_name(observed: ObservedDevice, name: DeviceName, table: Table) -> _Choice | None:
    row = next((row for row in table.devices if is_device_name(row, name)), None)
    evidence = None if row is None else compare_evidence(row, observed)
    if row is not None and evidence is not None and evidence.chip is not False:
        # Another SM count may be another product (an MI210 named MI250X); other memory under the same name is another board of the line.
        exact: list[Row] = []
        if evidence.sms is False and not name.mig_slices and not name.vgpu:
            exact = [other for other in table.devices if compare_evidence(other, observed).enough]
        if not exact:
            return _Choice(row)
        best, others = choose_best(exact)
        recorded = f"{observed.sm_count} SMs recorded, {row.name} has {row.chip.sm_count}"
        notice = make_notice(NoticeCode.DEVICE_TAKEN_AS, recorded=name.label, device=best.name, reason=recorded)
        return _Choice(best, others, notice)
    line = [(row, compare_evidence(row, observed)) for row in table.devices if is_device_name(row, name, family=True)]
    rows = [row for row, evidence in line if evidence.chip is not False]
    if not rows:
        return None
    exact = [row for row, evidence in line if False not in evidence]
    same_sms = [row for row, evidence in line if evidence.chip is not False and evidence.sms is not False]
    best, others = choose_best(exact or same_sms or rows)
    reason = f"settled by {_format_reason(observed)}" if exact else "the nearest of its product line"
    notice = make_notice(NoticeCode.DEVICE_BY_FAMILY, recorded=name.label, device=best.name, reason=reason)
    return _Choice(best, others, notice)


def _match_by_evidence(observed: ObservedDevice, name: DeviceName, table: Table) -> _Choice | None:
    """Return the row that everything recorded points at, for names that say nothing; None where it could be several architectures."""
    misnamed = any(is_device_name(row, name) for row in table.devices)  # and its chip was ruled out before
    if not name.anonymous and not misnamed:
        return None
    rows = [row for row in table.devices if compare_evidence(row, observed).enough and name.vendor in (None, row.chip.vendor)]
    if not rows or len({row.chip.architecture for row in rows}) > 1:
        return None
    best, others = choose_best(rows)
    why = " contradicts what is recorded" if misnamed else " does not name a product" if name.text else ""
    reason = _format_reason(observed)
    notice = make_notice(NoticeCode.DEVICE_BY_EVIDENCE, recorded=name.label, why=why, device=best.name, reason=reason)
    return _Choice(best, others, notice)


def choose_best(rows: Sequence[Row]) -> tuple[Row, tuple[Row, ...]]:
    """Return the row to take among those that fit alike, and the others: best known first, then the higher roof.

    The higher roof never shows an efficiency above 100 % for a device that has the lower one.
    """

    ranked = sorted(rows, key=lambda row: (_TRUST[row.provenance.confidence], -row.peaks_tflop_per_s["fp16"], -row.memory.gbyte_per_s))
    return ranked[0], tuple(ranked[1:])


def _measure_difference(device: Device, other: Device) -> float:
    mine, theirs = ({**one.peaks, "": one.bandwidth_byte_per_s or 0.0} for one in (device, other))
    if mine.keys() != theirs.keys():
        return 1.0
    return max(abs(value - theirs[key]) / value for key, value in mine.items())


def _format_reason(observed: ObservedDevice) -> str:
    parts = (
        observed.sm_count is not None and f"{observed.sm_count} SMs",
        observed.memory_bytes is not None and f"{observed.memory_bytes / 2**30:.3g} GiB",
        observed.compute_capability is not None and f"compute capability {cut_text(observed.compute_capability)}",
        observed.warp_size is not None and f"warp size {observed.warp_size}",
    )
    return ", ".join(part for part in parts if part) or "its name alone"


MIN_CLOCK_MHZ = 100.0
"""Below this a reading is a sleeping device or a fault of the driver, not a clock that kernels ran at."""

MAX_CLOCK_MHZ = 10_000.0
"""Above this it is a field that the driver did not fill."""


def find_observed_clock_mhz(telemetry: pl.DataFrame, spans: Sequence[tuple[int, int]]) -> float | None:
    """Return the median clock within the spans (Unix ns, half-open) in MHz; None where no sample tells.

    A sample holds until the next one, where that is not long: the last before a span counts for its start.
    """
    known = telemetry.filter(pl.col("sm_clock_mhz").is_between(MIN_CLOCK_MHZ, MAX_CLOCK_MHZ)).sort("t_ns")
    times, clocks = known["t_ns"].to_numpy(), known["sm_clock_mhz"].to_list()
    chosen: set[int] = set()
    for start, end in spans:
        first, last = (int(times.searchsorted(moment, side="left")) for moment in (start, end))
        # How long a clock still holds while no sample follows: one is taken every second at least, unless the driver stopped answering
        holds = first and not (first < last and times[first] == start) and start - int(times[first - 1]) <= 10 * 10**9
        chosen.update(range(first - 1 if holds else first, last))
    return statistics.median(clocks[row] for row in chosen) if chosen else None


def derate_device(device: Device, sm_clock_mhz: float | None) -> Device:
    """Return `device` with the compute peaks of `sm_clock_mhz`, never above the published ones, and a note that says so.

    Peaks scale with the SM clock: published ones hold at the boost clock, those of the matrix units at `tensor_clock_mhz` where that
    differs. Bandwidths do not: DRAM has a clock of its own, and the table holds none to compare with. Measured peaks stay: they hold at
    the clock that they were measured at.
    """
    if device.kind != "gpu" or device.provenance == "measured" or not device.boost_clock_mhz:
        return device
    boost, tensor = device.boost_clock_mhz, device.tensor_clock_mhz or device.boost_clock_mhz
    if sm_clock_mhz is None:
        note = f"Peaks at the boost clock of {boost:,.0f} MHz: the clock during the analysed steps was not recorded."
    elif sm_clock_mhz >= boost:
        note = f"Peaks at the boost clock of {boost:,.0f} MHz, which the run held ({sm_clock_mhz:,.0f} MHz observed)."
    else:
        peaks = {key: peak * min(1.0, sm_clock_mhz / (boost if key in VECTOR_PEAKS else tensor)) for key, peak in device.peaks.items()}
        source = f"{device.source}; {SCALED_PEAKS} {sm_clock_mhz:,.0f} / {boost:,.0f} MHz"
        special = device.special_per_s * sm_clock_mhz / boost if device.special_per_s else None
        device = msgspec.structs.replace(device, peaks=peaks, special_per_s=special, provenance="derived", source=source)
        at = f" (matrix units: {tensor:,.0f} MHz)" if tensor != boost else ""
        note = f"Peaks at the observed {sm_clock_mhz:,.0f} of {boost:,.0f} MHz{at}, the median over the analysed steps."
    return msgspec.structs.replace(device, notes=(note, *device.notes))
