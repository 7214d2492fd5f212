"""The gaps of a device: time in which no stream has work, each with what ended it."""

from __future__ import annotations

import numpy as np
import polars as pl

from gpudiag.attribution import intervals
from gpudiag.model import tables


def gaps(kernels: pl.DataFrame, launches: pl.DataFrame, window: intervals.Spans) -> pl.DataFrame:
    """Return the gaps of the device whose work is `kernels`, within the extent of `window`.

    kind: host_wait (the call that launched the next work began after the device had fallen idle), queued (it had been issued
    before), unlinked (the next work has no launch record), edge (nothing follows within the window).
    """
    if not len(window):
        return tables.empty("gaps")
    extent = np.array([[window[0, 0], window[-1, 1]]], dtype=np.int64)
    idle = intervals.subtract(extent, intervals.of(kernels))
    frame = pl.DataFrame({"start_ns": idle[:, 0], "end_ns": idle[:, 1]}, schema={"start_ns": pl.Int64, "end_ns": pl.Int64})
    # work without length ends no gap; what begins with the end of the window lies outside it
    working = (pl.col("end_ns") > pl.col("start_ns")) & (pl.col("start_ns") < int(extent[0, 1]))
    first = (
        kernels.select("start_ns", "end_ns", "id", "launch", "op")
        .filter(working)
        .sort("start_ns", "id")
        .unique("start_ns", keep="first", maintain_order=True)
    )
    first = first.select(pl.col("start_ns").alias("end_ns"), pl.col("id").alias("kernel"), "launch", "op")
    calls = launches.select(pl.col("id").alias("launch"), pl.col("start_ns").alias("launched_ns"))
    frame = frame.join(first, on="end_ns", how="left", maintain_order="left").join(calls, on="launch", how="left", maintain_order="left")
    kind = (
        pl.when(pl.col("kernel").is_null())
        .then(pl.lit("edge"))
        .when(pl.col("launched_ns").is_null())
        .then(pl.lit("unlinked"))
        .when(pl.col("launched_ns") > pl.col("start_ns"))
        .then(pl.lit("host_wait"))
        .otherwise(pl.lit("queued"))
    )
    frame = frame.with_columns(kind=kind, id=pl.int_range(frame.height, dtype=pl.Int64))
    return frame.select(list(tables.schema("gaps")))


def cpu_gaps(spans: intervals.Spans, window: intervals.Spans) -> pl.DataFrame:
    """Return the gaps of a CPU-only run: time of the window in which no thread ran an op (`spans`: when they did)."""
    if not len(window):
        return tables.empty("gaps")
    extent = np.array([[window[0, 0], window[-1, 1]]], dtype=np.int64)
    idle = intervals.subtract(extent, intervals.union(spans))
    frame = pl.DataFrame({"start_ns": idle[:, 0], "end_ns": idle[:, 1]}, schema={"start_ns": pl.Int64, "end_ns": pl.Int64})
    frame = frame.with_columns(
        id=pl.int_range(frame.height, dtype=pl.Int64),
        kind=pl.lit("host_wait"),
        kernel=pl.lit(None, dtype=pl.Int64),
        op=pl.lit(None, dtype=pl.Int64),
        launch=pl.lit(None, dtype=pl.Int64),
    )
    return frame.select(list(tables.schema("gaps")))
