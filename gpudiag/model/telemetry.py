"""What telemetry says of the steps: energy, clocks, limits that held the device back, memory. Keys of the Report JSON."""

from __future__ import annotations

from typing import Literal

import msgspec


class Energy(msgspec.Struct, frozen=True, kw_only=True):
    """Energy of the device in the steps that `of` names; all figures null where `reason` says why."""

    joule_per_step: float | None = None
    joule_per_sample: float | None = None
    mean_power_w: float | None = None
    steps: int = 0
    duration_ns: int = 0
    """Wall time of these steps."""
    of: Literal["unprofiled steps", "analysed steps"] | None = None
    """Unprofiled ones where there are enough: the profiler slows the host and with it changes the power of the device."""
    provenance: Literal["counter", "power"] | None = None
    """The device's energy counter at the step marks (interpolated), or its power integrated over time (trapezoid).

    A counter that stands still, jumps or contradicts the power is not used, and no step in which samples are missing.
    """
    uncertain_share: float | None = None
    """How far the figures may be off at the ends of each run of consecutive steps: half of the time between two values there, which is
    1 s at least where the driver averages power over one, / duration_ns."""
    note: str = ""
    """What else the figures hold: of the whole board, where MIG instances share it."""
    reason: str = ""


class ColumnRange(msgspec.Struct, frozen=True):
    """One column of telemetry in the steps: the median is weighted by how long each sample holds."""

    min: float
    median: float
    max: float
    samples: int
    unit: str
    covered_share: float = 1.0
    """Part of the steps' time for which a sample holds: none does for much longer than its column is usually asked."""


class ClockEvent(msgspec.Struct, frozen=True):
    """A reason for the clocks, as NVML names it, and the share of the time in which it held."""

    reason: str
    share: float
    lowers: bool
    """Whether it keeps the clocks below what the device could do; an idle GPU or a chosen clock does not."""


class TelemetryStrip(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry over the run, in slices of equal length; null: no sample fell into that slice."""

    span_ns: int
    """Of all slices together."""
    columns: dict[str, tuple[float | None, ...]] = {}
    """Mean of each slice, in the unit of the column."""
    lowered: dict[str, tuple[float | None, ...]] = {}
    """For each reason that lowered the clocks: the share of the samples of each slice that name it."""
    analysed_ns: tuple[tuple[int, int], ...] = ()
    """Begin and end of each stretch of analysed steps."""


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """Samples in the steps that `over` names. Reasons for what is not there are in `missing`."""

    source: str
    """'nvml' (and psutil for the host) or 'psutil'."""
    interval_ns: int
    samples: int
    """All of the run."""
    over: Literal["analysed steps", "all steps"]
    """All steps of the run where fewer than ten samples fall into the analysed ones."""
    columns: dict[str, ColumnRange] = {}
    clock_events: tuple[ClockEvent, ...] = ()
    throttle_share: float | None = None
    """Share of the sampled time in which any reason held that lowers clocks."""
    throttle_covered_share: float = 1.0
    """Part of the steps' time for which that is known."""
    rss_growth_share: float | None = None
    """Resident memory in the last quarter of the run over that in the second, less 1; null: shorter than a minute."""
    limits: dict[str, float] = {}
    missing: dict[str, str] = {}
    notes: dict[str, str] = {}
    strip: TelemetryStrip | None = None
    """None: too few samples, or a report of an older gpudiag."""


# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h: nvmlClocksEventReason*, older name nvmlClocksThrottleReason*), the words of
# `nvidia-smi -q -d PERFORMANCE`, and whether they hold the clocks below what the device could do under load.
CLOCK_EVENTS: dict[int, tuple[str, bool]] = {
    0x1: ("GPU Idle", False),
    0x2: ("Applications Clocks Setting", False),
    0x4: ("SW Power Cap", True),
    0x8: ("HW Slowdown", True),
    0x10: ("Sync Boost", True),
    0x20: ("SW Thermal Slowdown", True),
    0x40: ("HW Thermal Slowdown", True),
    0x80: ("HW Power Brake Slowdown", True),
    0x100: ("Display Clock Setting", False),
    0x200: ("Board Limit", True),
    0x400: ("Low Reliability", True),
}
