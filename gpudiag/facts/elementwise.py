"""Facts about element-wise work that could be fused (MEM-01, OVH-03)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.families import FUSABLE
from gpudiag.facts.registry import fact, require
from gpudiag.facts.window import Window

MEMORY_SHARE_OF_PEAK = 0.85
"""Share of the bandwidth that a fused kernel reaches (rules.md MEM-01)."""

_GENERATED = r"^triton_|^fused_"


def chains(window: Window) -> pl.DataFrame:
    """Return the chains of unfused element-wise kernels: ids, count, time_ns, bytes, between_bytes, ops, shapes.

    A chain: two or more element-wise kernels or casts that follow each other on one stream (CPU: thread) within one step and phase and
    handle the same number of elements. That each feeds the next is not recorded; equal size is the sign. The optimizer, whose
    kernels belong to MEM-05, and generated (already fused) kernels do not count. between_bytes: what is written by one kernel and read
    by the next, and would stay in registers in a fused one.
    """
    work = window.work(shapes=True)
    fusable = (pl.col("family") == "elementwise") | (pl.col("copy_kind") == "cast")
    link = (
        fusable
        & pl.col("numel").is_not_null()
        & pl.col("bytes_moved").is_not_null()
        & pl.col("phase").ne_missing("optimizer")
        & ~pl.col("name").str.contains(_GENERATED)
    )
    lane = pl.col("thread") if window.on_cpu else pl.col("stream")
    ordered = work.filter(_works(window)).with_columns(link=link.fill_null(False), lane=lane).sort("lane", "start_ns", "id")
    key = pl.struct("lane", "link", "numel", "step", "phase").rle_id()
    runs = ordered.with_columns(run=key).filter("link").group_by("run", maintain_order=True)
    between = 2 * (pl.col("numel") * pl.col("item_bytes")).slice(0, pl.len() - 1).sum()
    found = runs.agg(
        ids=pl.col("id"),
        count=pl.len(),
        time_ns=pl.col("time_ns").sum(),
        bytes=pl.col("bytes_moved").sum(),
        between_bytes=between.cast(pl.Float64),
        ops=pl.col("op_name").unique(maintain_order=True).str.join(", "),
        shapes=pl.col("shapes").first(),
    )
    return found.filter(pl.col("count") >= 2)


def _works(window: Window) -> pl.Expr:
    """Return which rows can end a chain: every kernel of a GPU; on a CPU only ops that do work (wrappers have self time too)."""
    return (pl.col("bytes_moved").fill_null(0) > 0) if window.on_cpu else pl.lit(True)


def chain_savings(window: Window) -> pl.DataFrame:
    """Return `chains` with saving_ns: their time beyond a fused kernel at 85 % of the bandwidth, at least 0."""
    found = chains(window)
    fused_bytes = (pl.col("bytes") - pl.col("between_bytes")).clip(lower_bound=0)
    fused_ns = fused_bytes / (MEMORY_SHARE_OF_PEAK * window.bandwidth) * 1e9
    return found.with_columns(saving_ns=(pl.col("time_ns") - fused_ns).clip(lower_bound=0))


def _saving_ns(window: Window) -> float:
    found = chain_savings(window)
    members = found.select(pl.col("ids").explode())["ids"].implode()
    chosen = window.kernels.filter(pl.col("id").is_in(members))
    return min(float(found["saving_ns"].sum()), float(window.exposed_ns(chosen)))


@fact("unfused_chain_saving_ns", unit="ns")
def unfused_chain_saving_ns(window: Window) -> float:
    """Time of unfused element-wise chains beyond what one fused kernel each would need at 85 % of the bandwidth."""
    return _saving_ns(window)


@fact("unfused_chain_saving_share", unit="share")
def unfused_chain_saving_share(window: Window) -> float:
    """unfused_chain_saving_ns over the wall time of the analysed steps."""
    return _saving_ns(window) / window.wall_ns


@fact("unfused_chain_ns", unit="ns")
def unfused_chain_ns(window: Window) -> int:
    """Time in unfused element-wise chains."""
    return int(chains(window)["time_ns"].sum())


@fact("unfused_chains", unit="count")
def unfused_chains(window: Window) -> int:
    """Number of unfused element-wise chains in the analysed steps."""
    return chains(window).height


@fact("unfused_chain_length", unit="count")
def unfused_chain_length(window: Window) -> float:
    """Mean number of kernels in an unfused element-wise chain."""
    found = chains(window)
    require(found.height > 0, "no chain of element-wise kernels")
    return float(found["count"].sum()) / found.height


@fact("fusable_share", unit="share")
def fusable_share(window: Window) -> float:
    """Time in element-wise, normalisation, softmax, reduction and copy ops, optimizer aside, over the busy time of the device."""
    require(window.busy_ns > 0, "the device did nothing in the analysed steps")
    work = window.work().filter(
        pl.col("family").is_in(FUSABLE) & pl.col("phase").ne_missing("optimizer") & ~pl.col("name").str.contains(_GENERATED)
    )
    return min(float(work["time_ns"].sum()) / window.busy_ns, 1.0)
