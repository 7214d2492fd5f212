"""Facts about host calls that wait for the device."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window


def syncs_of(window: Window) -> pl.DataFrame:
    """Return the syncs of the analysed steps; raises NotKnownError where runtime calls were not recorded."""
    window.require_accelerator()
    found = window.analysis.syncs
    if found is None or not window.analysis.trace.launches.height:
        raise NotKnownError("no runtime calls were recorded: record with activities=[CPU, CUDA]")
    return found.filter(pl.col("step").is_in(window.steps["id"].implode()))


@fact("sync_count", unit="count")
def sync_count(window: Window) -> int:
    """Calls within the analysed steps that held the host up until work of the device was over; a call that found it over does not count."""
    return syncs_of(window).filter(pl.col("waited_ns") > 0).height


@fact("sync_wait_ns", unit="ns")
def sync_wait_ns(window: Window) -> int:
    """Time of the host in such calls while the work that they waited for still ran, summed over the analysed steps.

    No loss by itself: the device works meanwhile. What it costs the device is sync_cost_ns.
    """
    return int(syncs_of(window)["waited_ns"].sum())


@fact("sync_cost_ns", unit="ns")
def sync_cost_ns(window: Window) -> int:
    """Idle time of the device that these calls are charged with: it ran dry while the host could not issue ahead."""
    cost = syncs_of(window)["cost_ns"]
    require(cost.null_count() == 0, "what the waits cost the device was not worked out: no idle time of the device is known")
    return int(cost.sum())
