"""Work that ran faster than its roof: no efficiency, but a sign that the peak or the count is wrong, or that the data was in the cache."""

from __future__ import annotations

import polars as pl

from gpudiag.model.cost import OVER_ROOF_ABOVE
from gpudiag.model.hardware import Device
from gpudiag.units import format_share

CAUSES = {
    "cache": "part of its data was in the last-level cache",
    "inner_cache": "part of its data was in the caches of the cores, not only in the last-level cache",
    "algorithm": "a fast convolution algorithm multiplies less than is counted",
    "unexplained": "a wrong peak or a wrong count, such as an expanded input without recorded strides",
}

_CACHES = 2.5
"""A call that moves more than this many caches is not explained by one: most of it has to come from DRAM."""

_SHOWN = 3
_SMALLEST = 0.0001
"""A share of time below this would read 0.00 %."""


def with_over_roof(frame: pl.DataFrame, device: Device | None) -> pl.DataFrame:
    """Return `frame` with `over_roof` (efficiency above OVER_ROOF_ABOVE) and `over_cause`, a key of CAUSES.

    cache: what the last-level cache can spare it of DRAM explains the rate. inner_cache: it was judged against the last-level cache
    already, and what the caches of the cores can spare it of that explains the rate.
    """
    outer, inner = (device.cache_bytes, device.inner_cache_bytes) if device else (None, None)
    dram, cache = (device.bandwidth_byte_per_s, device.cache_bandwidth_byte_per_s) if device else (None, None)
    by_dram = ~pl.col("cache_resident") & ~pl.col("host_copy")
    by_outer = pl.col("cache_resident") & (pl.col("call_bytes") > pl.lit(inner, dtype=pl.Float64))
    fast = pl.col("algorithm") & (pl.col("compute_ns") >= pl.col("memory_ns"))
    cause = (
        pl.when(fast)
        .then(pl.lit("algorithm"))
        .when(by_dram & _helped_by(outer, dram))
        .then(pl.lit("cache"))
        .when(by_outer & _helped_by(inner, cache))
        .then(pl.lit("inner_cache"))
        .otherwise(pl.lit("unexplained"))
    )
    frame = frame.with_columns(over_roof=(pl.col("efficiency") > OVER_ROOF_ABOVE).fill_null(False))
    return frame.with_columns(over_cause=pl.when("over_roof").then(cause))


def _helped_by(cache_bytes: float | None, rate: float | None) -> pl.Expr:
    """Return whether a call stays below its roof where a cache of `cache_bytes` spares it the way to what gives `rate` byte/s.

    It may have been read from the cache as much as that holds, and as much again may not have been written back yet.
    """
    size = pl.lit(cache_bytes, dtype=pl.Float64)
    moved = pl.coalesce("call_bytes", "bytes_moved")
    least = (moved - 2 * size) / pl.lit(rate, dtype=pl.Float64) * 1e9 * pl.col("part").fill_null(1.0)
    below = pl.max_horizontal("compute_ns", least) <= OVER_ROOF_ABOVE * pl.col("busy_ns")
    return (below & least.is_not_null() & (moved <= _CACHES * size)).fill_null(False)


def over_roof_warnings(rows: pl.DataFrame, work: str = "kernel") -> tuple[str, ...]:
    """Return one line on the op rows above their roof (share of the `work` time, the worst ops, why); nothing where there is none."""
    over = rows.filter(pl.col("over_roof").is_not_null())
    if not over.height:
        return ()
    share = int(over["kernel_ns"].sum()) / int(rows["kernel_ns"].sum())
    said = format_share(share, 2) if share >= _SMALLEST else f"under {format_share(_SMALLEST, 2)}"
    return (f"{said} of the {work} time ran faster than its roof, so that it has no efficiency; most of it: {_worst(over)}",)


def _worst(over: pl.DataFrame) -> str:
    """Return the ops with most time missing to their roof, one word for all rows of an op, gathered by cause."""
    missing = (pl.col("t_roof_ns") - pl.col("kernel_ns")).sum()
    ops = over.group_by("name", "over_roof_cause").agg(missing.alias("missing"), pl.len().alias("rows"), pl.col("over_roof").max())
    told: dict[str, list[str]] = {}
    ranked = ops.sort("missing", "name", descending=[True, False]).head(_SHOWN)
    for name, cause, rows, ratio in ranked.select("name", "over_roof_cause", "rows", "over_roof").iter_rows():
        most = format_share(ratio)
        told.setdefault(cause, []).append(f"{name} {most}" if rows == 1 else f"{name} up to {most} ({rows} rows)")
    return "; ".join(f"{', '.join(names)}: {CAUSES[cause]}" for cause, names in told.items())
