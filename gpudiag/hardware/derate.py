"""Peaks at the clock that the device ran at: power and temperature limits hold it below the boost clock of the data sheet."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
import polars as pl

from gpudiag.hardware.peaks import VECTOR
from gpudiag.model.hardware import SCALED, Device

MIN_CLOCK_MHZ = 100.0
"""Below this a reading is a sleeping device or a fault of the driver, not a clock that kernels ran at."""

MAX_CLOCK_MHZ = 10_000.0
"""Above this it is a field that the driver did not fill."""

HOLDS_NS = 10 * 10**9
"""How long a clock still holds while no sample follows: one is taken every second at least, unless the driver stopped answering."""


def observed_clock_mhz(telemetry: pl.DataFrame, spans: Sequence[tuple[int, int]], column: str = "sm_clock_mhz") -> float | None:
    """Return the median clock within the spans (Unix ns, half-open) in MHz; None where no sample tells.

    A sample holds until the next one, where that is not long: the last before a span counts for its start.
    """
    known = telemetry.filter(pl.col(column).is_between(MIN_CLOCK_MHZ, MAX_CLOCK_MHZ)).sort("t_ns").select("t_ns", column)
    times, clocks = known["t_ns"].to_numpy(), known[column].to_list()
    chosen: set[int] = set()
    for start, end in spans:
        first, last = (int(times.searchsorted(moment, side="left")) for moment in (start, end))
        holds = first and not (first < last and times[first] == start) and start - int(times[first - 1]) <= HOLDS_NS
        chosen.update(range(first - 1 if holds else first, last))
    return statistics.median(clocks[row] for row in chosen) if chosen else None


def derate(device: Device, sm_clock_mhz: float | None) -> Device:
    """Return `device` with the compute peaks of `sm_clock_mhz`, never above the published ones, and a note that says so.

    Peaks scale with the SM clock: published ones hold at the boost clock, those of the matrix units at `tensor_clock_mhz` where that
    differs. Bandwidths do not: DRAM has a clock of its own, and the table holds none to compare with. Measured peaks stay: they hold at
    the clock that they were measured at.
    """
    if device.kind != "gpu" or device.provenance == "measured" or not device.boost_clock_mhz:
        return device
    boost = device.boost_clock_mhz
    if sm_clock_mhz is None:
        return _noted(device, f"Peaks at the boost clock of {boost:,.0f} MHz: the clock during the analysed steps was not recorded.")
    if sm_clock_mhz >= boost:
        return _noted(device, f"Peaks at the boost clock of {boost:,.0f} MHz, which the run held ({sm_clock_mhz:,.0f} MHz observed).")
    tensor = device.tensor_clock_mhz or boost
    peaks = {key: peak * min(1.0, sm_clock_mhz / (boost if key in VECTOR else tensor)) for key, peak in device.peaks.items()}
    source = f"{device.source}; {SCALED} {sm_clock_mhz:,.0f} / {boost:,.0f} MHz"
    changed = msgspec.structs.replace(device, peaks=peaks, provenance="derived", source=source)
    at = f" (matrix units: {tensor:,.0f} MHz)" if tensor != boost else ""
    return _noted(changed, f"Peaks at the observed {sm_clock_mhz:,.0f} of {boost:,.0f} MHz{at}, the median over the analysed steps.")


def _noted(device: Device, note: str) -> Device:
    return msgspec.structs.replace(device, notes=(note, *device.notes))
