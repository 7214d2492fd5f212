"""Facts about collectives."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.registry import fact, require
from gpudiag.facts.window import Window


@fact("exposed_communication_ns", unit="ns")
def exposed_communication_ns(window: Window) -> int:
    """Time of the analysed steps in which collectives ran and nothing computed."""
    return window.analysis.breakdown.buckets_ns.exposed_communication


@fact("exposed_communication_share", unit="share")
def exposed_communication_share(window: Window) -> float:
    """exposed_communication_ns over the wall time of the analysed steps."""
    return window.analysis.breakdown.buckets_ns.exposed_communication / window.wall_ns


@fact("collective_ns", unit="ns")
def collective_ns(window: Window) -> int:
    """Summed time of the collectives within the analysed steps."""
    return int(window.kernels.filter(pl.col("collective").fill_null(False))["time_ns"].sum())


@fact("hidden_communication_share", unit="share")
def hidden_communication_share(window: Window) -> float:
    """Part of the collectives' time that runs under compute kernels (1 - exposed / all)."""
    total = int(window.kernels.filter(pl.col("collective").fill_null(False))["time_ns"].sum())
    require(total > 0, "no collective ran in the analysed steps")
    return max(0.0, 1 - window.analysis.breakdown.buckets_ns.exposed_communication / total)
