"""Facts about element-wise work that could be fused (MEM-01, OVH-03)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.registry import fact, require
from gpudiag.facts.window import Window
from gpudiag.roofline import chains as roofline_chains
from gpudiag.roofline.families import FUSABLE


def chains(window: Window) -> pl.DataFrame:
    """Return the chains of unfused element-wise kernels (columns and meaning: roofline.chains)."""
    return roofline_chains.chains(window.work(shapes=True), on_cpu=window.on_cpu)


def chain_savings(window: Window) -> pl.DataFrame:
    """Return `chains` with saving_ns: their time beyond a fused kernel at 85 % of the bandwidth, at least 0."""
    found = chains(window)
    fused_ns = roofline_chains.fused_ns(window.bandwidth)
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
        pl.col("family").is_in(FUSABLE) & pl.col("phase").ne_missing("optimizer") & ~pl.col("name").str.contains(roofline_chains.GENERATED)
    )
    return min(float(work["time_ns"].sum()) / window.busy_ns, 1.0)
