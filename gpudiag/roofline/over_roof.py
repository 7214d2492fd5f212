"""Work that ran faster than its roof: no efficiency, but a sign that the peak or the count is wrong, or that the data was in the cache."""

from __future__ import annotations

import polars as pl

from gpudiag.model.cost import OVER_ROOF_ABOVE
from gpudiag.model.hardware import Device

CAUSES = {
    "cache": "part of its data was in the last-level cache",
    "algorithm": "a fast convolution algorithm multiplies less than is counted",
    "unexplained": "a wrong peak or a wrong count, such as an expanded input without recorded strides",
}

_CACHES = 2.5
"""A call that moves more than this many caches is not explained by one: most of it has to come from DRAM."""

_SHOWN = 3


def with_over_roof(frame: pl.DataFrame, device: Device | None) -> pl.DataFrame:
    """Return `frame` with `over_roof` (efficiency above OVER_ROOF_ABOVE) and `over_cause`, a key of CAUSES.

    cache: of the call's bytes as much as the last-level cache holds may have been read from it, and as much again may not have been
    written back yet; with the rest the call stays below its roof. Not where it was judged against the cache already.
    """
    size = pl.lit(device.cache_bytes if device else None, dtype=pl.Float64)
    dram = pl.lit(device.bandwidth_byte_per_s if device else None, dtype=pl.Float64)
    moved = pl.coalesce("call_bytes", "bytes_moved") - 2 * size
    share = pl.col("part").fill_null(1.0)
    least = pl.max_horizontal("compute_ns", moved / dram * 1e9 * share)
    small = pl.coalesce("call_bytes", "bytes_moved") <= _CACHES * size
    cached = (least <= OVER_ROOF_ABOVE * pl.col("busy_ns")) & small & ~pl.col("cache_resident") & ~pl.col("host_copy")
    fast = pl.col("algorithm") & (pl.col("compute_ns") >= pl.col("memory_ns"))
    cause = pl.when(fast).then(pl.lit("algorithm")).when(cached.fill_null(False)).then(pl.lit("cache")).otherwise(pl.lit("unexplained"))
    frame = frame.with_columns(over_roof=(pl.col("efficiency") > OVER_ROOF_ABOVE).fill_null(False))
    return frame.with_columns(over_cause=pl.when("over_roof").then(cause))


def over_roof_warnings(rows: pl.DataFrame) -> tuple[str, ...]:
    """Return one line on the op rows above their roof (share of the kernel time, the worst three, why); nothing where there is none."""
    over = rows.filter(pl.col("over_roof").is_not_null())
    if not over.height:
        return ()
    share = int(over["kernel_ns"].sum()) / int(rows["kernel_ns"].sum())
    worst = over.sort(pl.col("t_roof_ns") - pl.col("kernel_ns"), descending=True).head(_SHOWN)
    shown = "; ".join(
        f"{name} {ratio:.0%} ({CAUSES[cause]})" for name, ratio, cause in worst.select("name", "over_roof", "over_roof_cause").iter_rows()
    )
    return (f"{share:.2%} of the kernel time ran faster than its roof, so that it has no efficiency; most of it: {shown}",)
