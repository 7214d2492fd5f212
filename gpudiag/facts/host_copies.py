"""Facts about copies from host memory to the device (INP-03)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window

LARGE_COPY_BYTES = 65_536
"""Smaller copies are latency, not bandwidth (rules.md INP-03: bytes >= 64 KiB)."""

PINNED_LINK_SHARE = 0.85
"""Share of the host link's rate that a pinned copy reaches: 80 to 88 % (rules.md INP-03)."""


def pageable_copies(window: Window) -> pl.DataFrame:
    """Return the large copies from pageable host memory; raises NotKnownError on a CPU-only run."""
    window.require_accelerator()
    pageable = pl.col("name").str.contains(r"HtoD \(Pageable|Host To Device.*[Pp]ageable")
    return window.kernels.filter((pl.col("kind") == "memcpy") & pageable & (pl.col("bytes") >= LARGE_COPY_BYTES))


def _require_memory_kinds(window: Window) -> None:
    """Raise NotKnownError where copies to the device were recorded without the kind of host memory (as ROCm does)."""
    copies = window.kernels.filter((pl.col("kind") == "memcpy") & pl.col("name").str.contains("HtoD"))
    named = copies.filter(pl.col("name").str.contains("Pageable|Pinned"))
    require(copies.height == named.height, "the profiler did not record whether host memory was pinned (ROCm does not)")


@fact("pageable_copy_exposed_ns", unit="ns")
def pageable_copy_exposed_ns(window: Window) -> int:
    """Time that only copies of 64 KiB or more from pageable host memory fill: nothing else ran on the device."""
    window.require_accelerator()
    _require_memory_kinds(window)
    return window.exposed_ns(pageable_copies(window))


@fact("pageable_copy_exposed_share", unit="share")
def pageable_copy_exposed_share(window: Window) -> float:
    """pageable_copy_exposed_ns over the wall time of the analysed steps."""
    window.require_accelerator()
    _require_memory_kinds(window)
    return window.exposed_ns(pageable_copies(window)) / window.wall_ns


@fact("pageable_copy_bytes", unit="B")
def pageable_copy_bytes(window: Window) -> int:
    """Bytes copied to the device from pageable memory in copies of 64 KiB or more, within the analysed steps."""
    return int(pageable_copies(window)["bytes"].sum())


@fact("pageable_copy_rate", unit="ratio")
def pageable_copy_rate(window: Window) -> float:
    """Rate of these copies in GB/s (1e9 bytes a second)."""
    copies = pageable_copies(window)
    require(copies.height > 0, "no large copy from pageable memory")
    return float(copies["bytes"].sum()) / float(copies["busy_ns"].sum())


@fact("pinned_copy_ns", unit="ns")
def pinned_copy_ns(window: Window) -> float:
    """Time that pinned copies of the same bytes would take at 85 % of the host link."""
    link = window.device.pcie_byte_per_s
    if link is None:
        raise NotKnownError("the rate of the host link is not known for this device")
    return float(pageable_copies(window)["bytes"].sum()) / (PINNED_LINK_SHARE * link) * 1e9
