"""A device with its peaks, and what telemetry says of it: energy, clocks, limits, memory."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from gpudiag.model.notices import Notice

DeviceKind = Literal["gpu", "cpu"]
PeakProvenance = Literal["datasheet", "derived", "unverified", "measured"]

SCALED_PEAKS = "peaks scaled by SM clock"
"""Stands in the source of a device whose peaks are not those of its row."""


# Weights in a type that the matrix units do not know are converted first (weight-only fp8 and fp4 on an A100); integers and fp64 are not.
_WIDER: dict[str, tuple[str, ...]] = {
    "fp4": ("fp8", "bf16", "fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp32",),
    "fp16": ("fp32",),
    "tf32": ("fp32",),
    "uint8": ("int8",),
    "complex64": ("fp32",),
    "complex128": ("fp64_tensor", "fp64"),
}


def build_device_key(name: str, index: int, uuid: str | None, sm_count: int | None) -> str:
    """Return a word that tells one device from others: a digest of its UUID and SMs (partitions of one device differ in SMs).

    Without a UUID: name and index. The digest keeps serial numbers out of bundles.
    """
    if not uuid:
        return f"{name} #{index}"
    return f"{name} {hashlib.sha256(f'{uuid} {sm_count}'.encode()).hexdigest()[:16]}"


class ObservedDevice(msgspec.Struct, frozen=True):
    """What a recording says about a device; any field may be unknown (None or '')."""

    index: int = 0
    name: str = ""
    sm_count: int | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None
    warp_size: int | None = None
    key: str | None = None
    """Bundles only: tells this very device from others of its name (`device_key`)."""


_LOWEST_RATE, _HIGHEST_FIGURE = 1e5, 1e20
"""FLOP/s, B/s, B, ns: one slow core does 1e9 FLOP/s, a rack of accelerators 1e18, and a slow host link 1e8 B/s."""


class HalfGain(msgspec.Struct, frozen=True):
    """How many times as fast one kind of work is under autocast to bf16 as in fp32, with its gradients and the casts of both."""

    kind: Literal["gemm", "conv", "attention", "add"]
    """add: bf16 operands, beyond the caches."""
    gain: float
    least: int = 1
    """Least of m, n and k; channels; length of the sequences."""
    other: int = 1
    """Both others; channels; size of a head."""


class Device(msgspec.Struct, frozen=True):
    """One device as torch enumerates it, with dense peak rates. Unknown figures are None or absent from `peaks`."""

    id: str
    """Row of the device table, or 'unknown-<name>' / 'cpu'."""
    name: str
    kind: DeviceKind
    provenance: PeakProvenance
    source: str
    """Where the figures come from, in words."""
    vendor: str = ""
    architecture: str = ""
    compute_capability: str | None = None
    sm_count: int | None = None
    boost_clock_mhz: float | None = None
    tensor_clock_mhz: float | None = None
    """Clock that the published matrix peaks imply, where it is not the boost clock."""
    memory_bytes: int | None = None
    bandwidth_byte_per_s: float | None = None
    """Theoretical DRAM bandwidth (a measured one where provenance is 'measured')."""
    cache_bytes: int | None = None
    """Last-level cache."""
    cache_bandwidth_byte_per_s: float | None = None
    """Measured only; None: `cache_resident` is not judged."""
    inner_cache_bytes: int | None = None
    """CPU: the level before the last, summed over the threads' cores."""
    inner_cache_byte_per_s: float | None = None
    """Measured only: roof of what fits the inner cache."""
    peaks: dict[str, float] = {}
    """Dense FLOP/s by engine: 'fp32' is the vector rate, 'tf32'/'fp16'/'bf16'/'fp8'/... the matrix rate of that type."""
    special_per_s: float | None = None
    """Results of elementary functions per second (CPU: torch.exp on data in the caches, measured)."""
    draws_per_s: float | None = None
    """CPU, measured: random numbers (uint8) that torch's generator draws per second."""
    half_gains: tuple[HalfGain, ...] = ()
    """CPU, measured: what bf16 gives by kind and size of the work; (): not measured, or there is no bf16 on it."""
    attained: dict[str, float] = {}
    """FLOP/s that the best matrix products attain within the power limit, by engine; absent: the vendor does not say."""
    pcie_byte_per_s: float | None = None
    """Host link, one direction: theoretical, or the best measured copy where provenance is 'measured'."""
    host_copy_byte_per_s: dict[str, float] = {}
    """Measured only: 'h2d pinned', 'h2d pageable', 'd2h pinned', 'd2h pageable'."""
    link_byte_per_s: float | None = None
    """NVLink / Infinity Fabric, one direction, theoretical."""
    launch_floor_ns: float | None = None
    """Shortest useful time of one launch (GPU: empty kernel; CPU: self time of an empty op)."""
    disturbed: bool = False
    """Whether other processes used the processors while the peaks were measured: they may be too low, and are not kept for other runs."""
    notes: tuple[str, ...] = ()
    key: str | None = None
    """Tells this very device from others of its name (see device_key); measured peaks are kept under it."""

    @property
    def believable(self) -> bool:
        """Return whether all figures are within what devices have: those of a file of unknown origin may be anything."""
        links = (self.pcie_byte_per_s, self.link_byte_per_s, *self.host_copy_byte_per_s.values())
        memory = (self.bandwidth_byte_per_s, self.cache_bandwidth_byte_per_s, self.inner_cache_byte_per_s)
        rates = (self.special_per_s, self.draws_per_s, *self.peaks.values(), *self.attained.values(), *memory, *links)
        clocks = (self.boost_clock_mhz, self.tensor_clock_mhz)
        others = (self.sm_count, self.memory_bytes, self.cache_bytes, self.inner_cache_bytes, self.launch_floor_ns, *clocks)
        halves = (figure for half in self.half_gains for figure in (half.gain, half.least, half.other))
        return all(rate is None or _LOWEST_RATE <= rate <= _HIGHEST_FIGURE for rate in rates) and all(
            figure is None or 0 <= figure <= _HIGHEST_FIGURE for figure in (*others, *halves)
        )

    def matrix_engine(self, dtype: str) -> str | None:
        """Return the key of `peaks` that holds for matrix work of `dtype`; None where no known engine can run it.

        AMD's matrix units take fp32 as well ('fp32_tensor'). A type without a path of its own runs on that of the next wider type,
        or on the vector units at the fp32 rate.
        """
        paths = (f"{dtype}_tensor", dtype, *_WIDER.get(dtype, ()))
        return next((path for path in paths if self.peaks.get(path)), None)

    def matrix_peak(self, dtype: str) -> float | None:
        """Return the peak in FLOP/s for matrix work of `dtype`; None where it is not known."""
        engine = self.matrix_engine(dtype)
        return None if engine is None else self.peaks[engine]

    def attainable_rate(self, engine: str, share: float) -> float | None:
        """Return the FLOP/s at `share` of the peak of `engine`, at most what its best products attain; None where it has no peak."""
        peak = self.peaks.get(engine)
        return None if peak is None else min(share * peak, self.attained.get(engine, peak))

    @property
    def vector_peak(self) -> float | None:
        """Return the fp32 vector peak in FLOP/s; None where it is not known."""
        return self.peaks.get("fp32")


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


MOST_OTHERS = 0.3
"""Share of the CPUs that other programs keep busy from which worker processes find none, and times are longer for it (as rule HW-05)."""


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
    notices: tuple[Notice, ...] = ()
    """What of `notes` figures depend on: xid_errors, board_shared, power_averaged."""
    strip: TelemetryStrip | None = None
    """None: too few samples, or a report of an older gpudiag."""

    @property
    def others_cpu_share(self) -> float | None:
        """Return the share, 0..1, of the machine's CPUs that other programs kept busy (medians); None where it was not sampled."""
        machine, own, cpus = self.columns.get("system_cpu_util_pct"), self.columns.get("cpu_util_pct"), self.limits.get("cpus", 0.0)
        if machine is None or own is None or cpus < 1:
            return None
        return max(0.0, machine.median - own.median / cpus) / 100


# GT/s of a lane by PCIe generation (PCI-SIG, PCI Express Base Specifications 1.0 to 6.0)
_LANE_GT_PER_S = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


def measure_link_share(now: tuple[float, float], most: tuple[float, float]) -> float | None:
    """Return the rate of a PCIe link (generation, lanes) over that of another; None for a generation that is not known."""
    rates = []
    for generation, lanes in (now, most):
        lane = _LANE_GT_PER_S.get(round(generation), 0.0)
        # Gbit/s of all lanes: generations 1 and 2 lose a fifth to 8b/10b coding, 3 and later 2 of 130 bits
        rates.append(lane * (0.8 if generation < 3 else 128 / 130) * lanes)
    return rates[0] / rates[1] if round(now[0]) in _LANE_GT_PER_S and rates[1] else None


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
