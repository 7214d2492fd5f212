"""Chains of element-wise kernels that one fused kernel could replace."""

from __future__ import annotations

import polars as pl

MEMORY_SHARE_OF_PEAK = 0.85
"""Share of the bandwidth that a fused kernel reaches (rules.md MEM-01)."""

GENERATED = r"^triton_|^fused_"
"""Kernels of Inductor: fused already."""


def chains(work: pl.DataFrame, *, on_cpu: bool) -> pl.DataFrame:
    """Return the chains of unfused element-wise kernels: ids, count, time_ns, bytes, between_bytes, ops, shapes.

    `work`: kernels with `name` as text, time_ns, op_name, phase, thread and the columns of calls.SCHEMA.
    A chain: two or more element-wise kernels or casts that follow each other on one stream (CPU: thread) within one step and phase and
    handle the same number of elements. That each feeds the next is not recorded; equal size is the sign. The optimizer, whose
    kernels belong to MEM-05, and generated (already fused) kernels do not count. between_bytes: what is written by one kernel and read
    by the next, and would stay in registers in a fused one.
    """
    fusable = (pl.col("family") == "elementwise") | (pl.col("copy_kind") == "cast")
    link = (
        fusable
        & pl.col("numel").is_not_null()
        & pl.col("bytes_moved").is_not_null()
        & pl.col("phase").ne_missing("optimizer")
        & ~pl.col("name").str.contains(GENERATED)
    )
    # what ends a chain: any kernel of a GPU; on a CPU only an op that does work (wrappers have self time too, and a Python number that
    # stands in an expression is converted by a copy of its own)
    number = ((pl.col("family") == "copy") & (pl.col("numel") <= 1)).fill_null(False)
    works = ((pl.col("bytes_moved").fill_null(0) > 0) & ~number) if on_cpu else pl.lit(True)
    lane = pl.col("thread") if on_cpu else pl.col("stream")
    columns = ("id", "start_ns", "numel", "step", "phase", "time_ns", "bytes_moved", "item_bytes", "op_name", "shapes")
    asked = work.select(*columns, link=link.fill_null(False), lane=lane, works=works)  # before rows are chosen, which copies all columns
    ordered = asked.filter("works").drop("works").sort("lane", "start_ns", "id")
    same = ("lane", "link", "numel", "step", "phase")
    begins = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift()) for name in same)  # rle_id of a struct encodes all rows
    linked = ordered.with_columns(run=begins.cum_sum()).filter("link")
    runs = linked.filter(pl.len().over("run") >= 2).group_by("run", maintain_order=True)
    between = 2 * (pl.col("numel") * pl.col("item_bytes")).slice(0, pl.len() - 1).sum()
    return runs.agg(
        ids=pl.col("id"),
        count=pl.len(),
        time_ns=pl.col("time_ns").sum(),
        bytes=pl.col("bytes_moved").sum(),
        between_bytes=between.cast(pl.Float64),
        ops=pl.col("op_name").unique(maintain_order=True).str.join(", "),
        shapes=pl.col("shapes").first(),
    )


def fused_ns(bandwidth_byte_per_s: float) -> pl.Expr:
    """Return the time in ns of one fused kernel for each chain, at 85 % of the bandwidth."""
    fused_bytes = (pl.col("bytes") - pl.col("between_bytes")).clip(lower_bound=0)
    return fused_bytes / (MEMORY_SHARE_OF_PEAK * bandwidth_byte_per_s) * 1e9
