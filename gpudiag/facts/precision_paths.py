"""Which path fp32 and fp64 matrix work took: slow (IEEE, vector units) or fast (TF32 on matrix engines)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.families import MATRIX
from gpudiag.facts.window import Window
from gpudiag.roofline.engine import FAST_NAMES, SLOW_NAMES, TENSOR_CORE_ABOVE


def with_path(window: Window, work: pl.DataFrame) -> pl.DataFrame:
    """Return `work` with a column path: 'fast' | 'slow' for fp32 and fp64 matrix work, null where nothing tells, and for other work.

    fp64 is always slow. fp32: by the achieved rate, then the kernel's name, then the settings found when the run was recorded.
    """
    vector = window.analysis.device.vector_peak if window.analysis.device else None
    too_fast = pl.lit(False) if vector is None else pl.col("flops") / pl.col("busy_ns") * 1e9 > TENSOR_CORE_ABOVE * vector
    name = pl.col("name")
    path = (
        pl.when(~pl.col("family").is_in(MATRIX))
        .then(None)
        .when(pl.col("dtype") == "fp64")
        .then(pl.lit("slow"))
        .when(pl.col("dtype") != "fp32")
        .then(None)
        .when(too_fast.fill_null(False) | name.str.contains(FAST_NAMES))
        .then(pl.lit("fast"))
        .when(name.str.contains(SLOW_NAMES))
        .then(pl.lit("slow"))
        .otherwise(_by_settings(window))
    )
    return work.with_columns(path.alias("path"))


def _by_settings(window: Window) -> pl.Expr:
    """Return the path that the recorded settings force: TF32 not allowed means slow; allowed means nothing (the library chooses)."""
    manifest = window.analysis.manifest
    if manifest is None:
        return pl.lit(None, dtype=pl.String)
    settings = manifest.settings
    gemm_off = settings.cuda_matmul_allow_tf32 is False
    conv_off = settings.cudnn_allow_tf32 is False
    slow = (pl.lit(gemm_off) & (pl.col("family") == "gemm")) | (pl.lit(conv_off) & (pl.col("family") == "conv"))
    return pl.when(slow).then(pl.lit("slow")).otherwise(pl.lit(None, dtype=pl.String))
