"""How often a grid fills the device: waves of thread blocks."""

from __future__ import annotations

import polars as pl

from gpudiag.model.hardware import Device

_THREADS_PER_SM = {"7.5": 1024, "8.6": 1536, "8.7": 1536, "8.9": 1536, "12.0": 1536, "12.1": 1536}
"""Maximum resident threads of an SM where they are not 2048 (CUDA C++ Programming Guide, technical specifications)."""

_ROUNDING = 0.005
"""The occupancy is recorded in whole percents."""


def waves(device: Device | None) -> pl.Expr:
    """Return grid / (SMs x resident blocks an SM) of each kernel; null where grid, block or occupancy were not recorded.

    The recorded 'est. achieved occupancy' is resident blocks an SM x block / maximum threads, where the resident blocks are at most those
    that the grid gives each SM (libkineto; in real traces they are whole numbers wherever the grid is larger). So 1 means at most one
    wave; below 1 some SMs get no block.
    """
    if device is None or not device.sm_count or device.vendor != "nvidia":
        return pl.lit(None, dtype=pl.Float64)
    threads = _THREADS_PER_SM.get(device.compute_capability or "", 2048)
    given = pl.col("grid") / device.sm_count
    resident = pl.col("occupancy") * threads / pl.col("block")
    by_grid = (resident - given).abs() <= _ROUNDING * threads / pl.col("block")
    resident = pl.max_horizontal(pl.when(by_grid).then(given).otherwise(resident.round()), pl.lit(1.0))
    known = (pl.col("occupancy") > 0) & (pl.col("block") > 0) & (pl.col("grid") > 0)
    return pl.when(known).then(given / resident)
