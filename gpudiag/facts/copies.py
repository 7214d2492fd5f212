"""Facts about copies that only change the layout of a tensor (MEM-07)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.registry import fact, require
from gpudiag.facts.window import Window


def layout_copies(window: Window) -> pl.DataFrame:
    """Return the kernels that reorder, join or pad tensors, and device-to-device copies; raises NotKnownError where most cannot be told.

    Casts (another dtype) and copies in and out of communication buckets do not count.
    """
    work = window.work(shapes=True)
    copies = work.filter(pl.col("family") == "copy")
    found = work.filter((pl.col("copy_kind") == "layout") | ((pl.col("kind") == "memcpy") & pl.col("name").str.contains("DtoD")))
    found = found.filter(~pl.col("op_name").fill_null("").str.contains(r"reducer|c10d::"))
    untold = copies.filter(pl.col("copy_kind").is_null() & (pl.col("kind") != "memcpy"))
    limit = max(int(found["time_ns"].sum()), 0.01 * window.wall_ns)
    require(
        int(untold["time_ns"].sum()) <= limit,
        "strides were not recorded: which copies change the layout cannot be told (torch >= 2.2 records them)",
    )
    return found


@fact("layout_copy_share", unit="share")
def layout_copy_share(window: Window) -> float:
    """Time in copies that reorder, join or pad tensors, over the wall time of the analysed steps."""
    return window.share_of_wall(layout_copies(window))


@fact("layout_copy_ns", unit="ns")
def layout_copy_ns(window: Window) -> int:
    """Time that only layout copies fill: nothing else ran on the device."""
    copies = layout_copies(window)
    return min(int(copies["time_ns"].sum()), window.exposed_ns(copies))


@fact("without_layout_copies_ns", unit="ns")
def without_layout_copies_ns(window: Window) -> float:
    """Time that the analysed steps would save without layout copies: replayed, else layout_copy_ns."""
    return window.saving_ns(layout_copies(window), pl.lit(0.0))
