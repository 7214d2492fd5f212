"""Facts about copies that only change the layout of a tensor (MEM-07)."""

from __future__ import annotations

import polars as pl

from gpudiag.attribution.names import texts
from gpudiag.facts.attention import unfused_attention
from gpudiag.facts.composites import composites
from gpudiag.facts.registry import fact, require
from gpudiag.facts.vocabulary import vocabulary_work
from gpudiag.facts.window import Window
from gpudiag.roofline.families import MATRIX, family


def layout_copies(window: Window) -> pl.DataFrame:
    """Return the kernels that reorder, join or pad tensors, and device-to-device copies; raises NotKnownError where most cannot be told.

    Casts (another dtype), copies in and out of communication buckets, those that a product makes itself and
    those that other rules claim (MEM-02 to MEM-04) do not count.
    """
    work = window.work(shapes=True)
    copies = work.select("family", "kind", "copy_kind", "time_ns").filter(pl.col("family") == "copy")
    found = work.filter((pl.col("copy_kind") == "layout") | ((pl.col("kind") == "memcpy") & pl.col("name").str.contains("DtoD")))
    found = found.filter(~pl.col("op_name").fill_null("").str.contains(r"reducer|c10d::") & ~_inside_products(window, found))
    untold = copies.filter(pl.col("copy_kind").is_null() & (pl.col("kind") != "memcpy"))
    limit = max(int(found["time_ns"].sum()), 0.01 * window.wall_ns)
    require(
        int(untold["time_ns"].sum()) <= limit,
        "strides were not recorded: which copies change the layout cannot be told (torch >= 2.2 records them)",
    )
    claimed = pl.concat([made(window)["id"] for made in (vocabulary_work, composites, unfused_attention)]).implode()
    return found.filter(~pl.col("id").is_in(claimed))


def _inside_products(window: Window, copies: pl.DataFrame) -> pl.Series:
    """Return which copies a product or convolution makes itself: its bias spread over the result (CPU), its operands packed."""
    ops = window.analysis.trace.ops
    names = texts(ops["name"].gather(ops["parent"].gather(copies["call"])))  # an op's id is its row
    return pl.Series([family(name or "") in MATRIX for name in names], dtype=pl.Boolean)


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
