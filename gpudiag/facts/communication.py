"""Facts about collectives."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.messages import GRADIENT_KINDS
from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window


@fact("exposed_communication_ns", unit="ns")
def exposed_communication_ns(window: Window) -> int:
    """Time of the analysed steps in which collectives ran and nothing computed."""
    return window.analysis.breakdown.buckets_ns.exposed_communication


@fact("exposed_communication_share", unit="share")
def exposed_communication_share(window: Window) -> float:
    """exposed_communication_ns over the wall time of the analysed steps."""
    return window.analysis.breakdown.buckets_ns.exposed_communication / window.wall_ns


@fact("exposed_waiting_part", unit="share")
def exposed_waiting_part(window: Window) -> float:
    """Part of the median rank's exposed communication before the last rank has arrived: a late rank or load, which no link makes faster."""
    job = window.analysis.job
    row = next((row for row in job.ranks if row.rank == job.shown_rank), None) if job is not None else None
    if row is None or row.exposed_waiting_ns is None or not row.exposed_communication_ns:
        raise NotKnownError("one rank's trace does not tell waits from transfer: messages of all ranks have to be matched")
    return min(1.0, row.exposed_waiting_ns / row.exposed_communication_ns)


def waiting_part(window: Window, kind: str) -> float:
    """Return the part of the time in matched messages of `kind` before the last rank has arrived. Raises NotKnownError."""
    job = window.analysis.job
    rows = [row for row in job.messages if row.kind == kind and row.count] if job is not None else []
    waiting, transfer = (sum(row.count * getattr(row, name) for row in rows) for name in ("waiting_ns", "transfer_ns"))
    require(waiting + transfer > 0, "one rank's trace does not tell waits from transfer: messages of all ranks have to be matched")
    return float(waiting / (waiting + transfer))


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


@fact("longest_exchange", unit="text")
def longest_exchange(window: Window) -> str:
    """What the collectives of the analysed steps take most of their time for: 'gradients', or else the kind of message ('all_to_all').

    Gradients: all_reduce and reduce_scatter, but for those that another pass than the backward one is known to call.
    """
    gradients = pl.col("kind").is_in(GRADIENT_KINDS) & (pl.col("phase").fill_null("backward") == "backward")
    told = pl.when(gradients).then(pl.lit("gradients")).otherwise("kind").alias("told")
    found = window.messages.group_by(told).agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("time")).sort("time", "told")
    longest = found["told"][-1]
    require(longest is not None, "the names of most collectives do not tell what they send")
    return str(longest)
