"""Which path fp32 and fp64 matrix work took: slow (IEEE, vector units) or fast (TF32 on matrix engines)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.window import Window
from gpudiag.roofline.families import MATRIX


def with_path(window: Window, work: pl.DataFrame) -> pl.DataFrame:
    """Return `work` with a column path: 'fast' | 'slow' for fp32 and fp64 matrix work, null where nothing tells, and for other work.

    fp64 is always slow. fp32: by the engine that its roofline names (roofline/engine.py), where a kernel's name, the settings or the rate
    told it. TF32 that was merely allowed tells nothing: the library chooses.
    """
    told, allowed = pl.col("engine_by") != "type", (pl.col("engine") == "tf32") & (pl.col("engine_by") == "settings")
    path = (
        pl.when(~pl.col("family").is_in(MATRIX))
        .then(None)
        .when(pl.col("dtype") == "fp64")
        .then(pl.lit("slow"))
        .when((pl.col("dtype") == "fp32") & told & ~allowed)
        .then(pl.when(pl.col("engine") == "tf32").then(pl.lit("fast")).otherwise(pl.lit("slow")))
    )
    return work.with_columns(path.alias("path"))
