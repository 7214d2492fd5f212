"""A device with its peaks, as the roofline needs it."""

from __future__ import annotations

from typing import Literal

import msgspec

DeviceKind = Literal["gpu", "cpu"]
PeakProvenance = Literal["datasheet", "derived", "unverified", "measured"]


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
    memory_bytes: int | None = None
    bandwidth_byte_per_s: float | None = None
    """Theoretical DRAM bandwidth (a measured one where provenance is 'measured')."""
    cache_bytes: int | None = None
    """Last-level cache."""
    cache_bandwidth_byte_per_s: float | None = None
    """Measured only; None: `cache_resident` is not judged."""
    peaks: dict[str, float] = {}
    """Dense FLOP/s by engine: 'fp32' is the vector rate, 'tf32'/'fp16'/'bf16'/'fp8'/... the matrix rate of that type."""
    pcie_byte_per_s: float | None = None
    """Host link, one direction, theoretical."""
    link_byte_per_s: float | None = None
    """NVLink / Infinity Fabric, one direction, theoretical."""
    launch_floor_ns: float | None = None
    """Shortest useful time of one launch (GPU: empty kernel; CPU: self time of an empty op)."""
    notes: tuple[str, ...] = ()

    def matrix_peak(self, dtype: str) -> float | None:
        """Return the peak in FLOP/s for matrix work of `dtype`; None where it is not known.

        A type without a matrix path on this device runs on the vector units at the fp32 rate (fp64: its own rate).
        AMD's matrix units take fp32 as well ('fp32_tensor').
        """
        peak = self.peaks.get(f"{dtype}_tensor") or self.peaks.get(dtype)
        return peak if peak or dtype == "fp64" else self.peaks.get("fp32")

    @property
    def vector_peak(self) -> float | None:
        """Return the fp32 vector peak in FLOP/s; None where it is not known."""
        return self.peaks.get("fp32")
