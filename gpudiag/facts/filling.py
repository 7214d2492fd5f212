"""Facts about matrix kernels that leave much of a GPU empty, or run far below their roof (CMP-06)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.once import once
from gpudiag.facts.precision_paths import with_path
from gpudiag.facts.registry import fact, require
from gpudiag.facts.window import Window
from gpudiag.roofline.families import MATRIX

FULL_WAVES = 0.75
"""Waves over the next whole number below which a kernel of less than two waves is under-filled (rules.md CMP-06; op_costs section 1.2)."""

SLOW = 0.55
"""Efficiency below which a large aligned product is slow (rules.md CMP-06)."""

LARGE_DIMENSION = 1024
"""Least m, n and k of a product that could fill a device (heuristic: 64 tiles of 128 x 128)."""

SHARE_OF_ROOF = 0.8
"""What well-chosen kernels reach (rules.md CMP-06, gain bound)."""

_PERSISTENT = r"(?i)nvjet|stream_?k|persistent|flash|fmha|cudnn_generated_fort_native_sdpa"
"""Kernels that launch one block an SM, or as many as it holds, by design."""


@once
def _matrix_kernels(window: Window) -> pl.DataFrame:
    window.require_accelerator()
    work = with_path(window, window.work(shapes=True)).filter(pl.col("family").is_in(MATRIX) & (pl.col("kind") == "kernel"))
    return work.filter((pl.col("bound") != "memory").fill_null(True) & (pl.col("path").fill_null("fast") != "slow"))


def underfilled_kernels(window: Window) -> pl.DataFrame:
    """Return the matrix kernels with fewer blocks than multiprocessors, or a second wave that is less than half full.

    Those that memory binds (CMP-05), persistent kernels, which launch as many blocks as there are multiprocessors, and work without a
    roof do not count.
    """
    work = _matrix_kernels(window).filter(pl.col("efficiency").is_not_null())
    count = window.device.sm_count
    require(bool(count) and bool((work["grid"] > 0).any() or not work.height), "the grids of the kernels were not recorded")
    waves = pl.coalesce(pl.col("waves"), pl.col("grid") / (count or 1))
    few = (pl.col("grid") > 0) & (pl.col("grid") < count)
    tail = (waves > 1) & (waves < 2) & (waves / waves.ceil() < FULL_WAVES)
    persistent = (pl.col("grid") == count) | pl.col("name").str.contains(_PERSISTENT)
    return work.filter((few | tail).fill_null(False) & ~persistent & (pl.col("efficiency") < SHARE_OF_ROOF))


@fact("underfilled_share", unit="share")
def underfilled_share(window: Window) -> float:
    """Time in matrix kernels with fewer blocks than multiprocessors or a second wave less than half full, over the wall time."""
    return window.share_of_wall(underfilled_kernels(window))


def slow_products(window: Window) -> pl.DataFrame:
    """Return the products with m, n and k of at least 1024, aligned to 16 bytes, that arithmetic binds and that reach less than 0.55."""
    work = _matrix_kernels(window).filter((pl.col("family") == "gemm") & (pl.col("bound") == "compute"))
    aligned = pl.all_horizontal(pl.col(name) * pl.col("item_bytes") % 16 == 0 for name in ("m", "n", "k"))
    large = pl.min_horizontal("m", "n", "k") >= LARGE_DIMENSION
    return work.filter(large & aligned & (pl.col("efficiency") < SLOW))


@fact("slow_product_share", unit="share")
def slow_product_share(window: Window) -> float:
    """Time in large aligned products (m, n, k >= 1024) that reach less than 0.55 of their roof, over the wall time."""
    return window.share_of_wall(slow_products(window))


@fact("filling_saving_ns", unit="ns")
def filling_saving_ns(window: Window) -> float:
    """Time that under-filled kernels and slow large products would save at 80 % of their roof."""
    both = pl.concat([underfilled_kernels(window), slow_products(window)]).unique("id").sort("id")
    return window.saving_ns(both, pl.col("t_roof_ns") / SHARE_OF_ROOF)
