"""Facts about how well grids of thread blocks fill the device."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window

FEW_WAVES = 8
"""A last wave that is nearly empty costs 1 / (waves + 1) of the time: beyond this many, less than about a tenth."""

HALF_FULL = 0.5

ROUNDED = 0.005
"""libkineto writes occupancy in whole percent: waves that follow from it may seem to begin one more."""


def _computing(window: Window) -> pl.DataFrame:
    """Return the kernels of the analysed steps; collectives aside, which occupy few multiprocessors by design."""
    window.require_accelerator()
    work = window.kernels.select("kind", "collective", "occupancy", "waves", "grid", "time_ns")
    work = work.filter((pl.col("kind") == "kernel") & ~pl.col("collective").fill_null(False))
    require(work.height > 0, "no kernel ran in the analysed steps")
    return work


@fact("occupancy_share", unit="share")
def occupancy_share(window: Window) -> float:
    """Mean of the profiler's 'est. achieved occupancy' over the time of the kernels that have one, collectives aside.

    Resident warps over the most that a multiprocessor holds, estimated from the launch, not measured. High occupancy is no aim by
    itself: good matrix kernels run at 10 to 30 %. A record of 0 means that it could not be computed.
    """
    known = _computing(window).filter(pl.col("occupancy") > 0)
    require(known.height > 0, "occupancy was not recorded (CUPTI records it, ROCm does not)")
    return float((known["occupancy"] * known["time_ns"]).sum()) / int(known["time_ns"].sum())


@fact("wave_tail_share", unit="share")
def wave_tail_share(window: Window) -> float:
    """Part of the kernel time in kernels of at most 8 waves of thread blocks whose last wave fills less than half of the device.

    Waves: grid / (multiprocessors x resident blocks), by the recorded occupancy; where that is missing, one block per multiprocessor is
    assumed, which counts too many waves for small blocks (NVIDIA Matrix Multiplication Background guide, wave quantization).
    """
    work = _computing(window)
    device = window.analysis.device
    if device is None or not device.sm_count:
        raise NotKnownError("the number of multiprocessors of this device is not known")
    waves = pl.coalesce(pl.col("waves"), pl.when(pl.col("grid") > 0).then(pl.col("grid") / device.sm_count))
    unsure = (pl.col("waves") * ROUNDED / pl.col("occupancy")).fill_null(0.0)
    work = work.with_columns(waves.alias("waves"), unsure.alias("unsure")).filter(pl.col("waves").is_not_null())
    require(work.height > 0, "the grids of the kernels were not recorded")
    last = pl.col("waves") - (pl.col("waves").ceil() - 1)
    tail = work.filter((pl.col("waves") <= FEW_WAVES) & (last < HALF_FULL) & (last > pl.col("unsure")))
    return int(tail["time_ns"].sum()) / int(work["time_ns"].sum())
