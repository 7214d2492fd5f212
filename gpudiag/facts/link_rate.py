"""Facts about how fast collectives are against the link between the GPUs."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.communication import exposed_waiting_part
from gpudiag.facts.messages import exposed_ns
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window
from gpudiag.model.job import MessageRow
from gpudiag.roofline.costs.collectives import bus_factor

LARGE_BYTES = 64 << 20
"""Smaller messages are bound by latency rather than by the link (NVIDIA nccl-tests, doc/PERFORMANCE.md)."""

ONE_MACHINE = 8
"""Ranks that one machine of the usual kind holds: a larger group sends through the network, whose rate is not known."""

_FACTOR_OF = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")


def _large(window: Window) -> pl.DataFrame:
    """Return the large messages within one machine with their bus_byte_per_s. Raises NotKnownError where there is none."""
    window.require_accelerator()
    found = window.messages.filter(pl.col("kind").is_in(_FACTOR_OF) & (pl.col("bytes") >= LARGE_BYTES))
    require(found.height > 0, "no collective of 64 MiB or more with its size ran in the analysed steps: smaller ones are bound by latency")
    found = found.filter((pl.col("size") > 1) & (pl.col("size") <= ONE_MACHINE))
    require(found.height > 0, f"all large collectives are of groups of more than {ONE_MACHINE} ranks: the rate of the network is not known")
    factors = [bus_factor(kind, size) for kind, size in found.select("kind", "size").iter_rows()]
    time = (pl.col("end_ns") - pl.col("start_ns")).clip(lower_bound=1)
    return found.with_columns(bus_byte_per_s=pl.col("bytes") / time * 1e9 * pl.Series(factors, dtype=pl.Float64))


def _compared(window: Window) -> list[MessageRow]:
    """Return the large messages within one machine whose transfer, without waits, is known from all ranks."""
    rows = window.analysis.job.messages if window.analysis.job is not None else ()
    large = (row for row in rows if row.kind in _FACTOR_OF and (row.bytes or 0) >= LARGE_BYTES)
    return [row for row in large if row.busbw_byte_per_s is not None and 1 < len(row.members) <= ONE_MACHINE]


@fact("fastest_collective_bytes_per_second", unit="B")
def fastest_collective_bytes_per_second(window: Window) -> float:
    """Bus bandwidth (nccl-tests) in bytes per second of the fastest collective of 64 MiB or more in a group of at most 8 ranks.

    Where messages of all ranks were matched: of the kind and group whose mean transfer, from the last arrival to the end, is fastest.
    Else of the fastest message: a kernel's time holds its wait for the other ranks, and the fastest of many waited least.
    """
    window.require_accelerator()
    if compared := _compared(window):
        return max(row.busbw_byte_per_s or 0.0 for row in compared)
    return float(_large(window)["bus_byte_per_s"].max())  # type: ignore[arg-type]


@fact("link_rate_without_waits", unit="bool")
def link_rate_without_waits(window: Window) -> bool:
    """Whether waits for other ranks are left out of fastest_collective_bytes_per_second."""
    fastest_collective_bytes_per_second(window)
    return bool(_compared(window))


@fact("link_bytes_per_second", unit="B")
def link_bytes_per_second(window: Window) -> float:
    """Theoretical rate of the link between the GPUs in bytes per second, one direction (NVLink, Infinity Fabric), by the device table."""
    window.require_accelerator()
    found = window.device.link_byte_per_s
    if found is None:
        raise NotKnownError("the device table knows no direct link of this GPU to others (they go through PCIe)")
    return found


@fact("collective_link_share", unit="share")
def collective_link_share(window: Window) -> float:
    """Rate of the fastest large collective over that of the link between the GPUs."""
    return float(fastest_collective_bytes_per_second(window)) / float(link_bytes_per_second(window))


@fact("large_collectives_exposed_ns", unit="ns")
def large_collectives_exposed_ns(window: Window) -> int:
    """Time of the analysed steps that only collectives of 64 MiB or more fill; without waits for other ranks, where these are known."""
    waiting = exposed_waiting_part(window) if window.analysis.job is not None and _compared(window) else 0.0
    return round(exposed_ns(window, _large(window)) * (1 - float(waiting)))
