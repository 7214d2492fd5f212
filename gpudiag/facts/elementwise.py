"""Facts about element-wise work that could be fused (MEM-01, OVH-03)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts import attained
from gpudiag.facts.attention import unfused_attention
from gpudiag.facts.composites import composites
from gpudiag.facts.once import once
from gpudiag.facts.registry import fact, require
from gpudiag.facts.vocabulary import vocabulary_work
from gpudiag.facts.window import Window
from gpudiag.roofline import chains as roofline_chains
from gpudiag.roofline.families import FUSABLE


@once
def chains(window: Window) -> pl.DataFrame:
    """Return the chains of unfused element-wise kernels (columns and meaning: roofline.chains).

    Ops that another rule claims end a chain: hand-written patterns (MEM-02), unfused attention (MEM-03), a loss over a large vocabulary
    (MEM-04).
    """
    work = window.work(shapes=True)
    claimed = pl.concat([composites(window)["id"], unfused_attention(window)["id"], vocabulary_work(window)["id"]]).implode()
    taken = pl.col("id").is_in(claimed)
    free = work.with_columns(family=pl.when(~taken).then("family"), copy_kind=pl.when(~taken).then("copy_kind"))
    return roofline_chains.chains(free, on_cpu=window.on_cpu)


def _members(window: Window, found: pl.DataFrame) -> pl.DataFrame:
    """Return the kernels of the chains `found` with column chain, its number."""
    numbers = found.select("ids").with_row_index("chain").explode("ids").rename({"ids": "id"})
    return window.kernels.join(numbers, on="id", how="inner")


@once
def chain_savings(window: Window) -> pl.DataFrame:
    """Return `chains` with fused_ns, the time of one fused kernel each, and saving_ns: their time beyond it, at least 0.

    At 85 % of the bandwidth, or the best rate that ops of the chains reach; on a CPU with the arithmetic of transcendental functions, as
    far as they take longer than streaming at that best rate.
    """
    found = chains(window)
    members = _members(window, found)
    total = float(members["time_ns"].sum())
    streaming = attained.stream_byte_per_s(window, members)
    arithmetic = attained.arithmetic_ns(window, members, streaming) / total if total else 0.0
    rate = max(streaming, attained.MEMORY_SHARE_OF_PEAK * window.bandwidth)
    fused_bytes = (pl.col("bytes") - pl.col("between_bytes")).clip(lower_bound=0)
    found = found.with_columns(fused_ns=fused_bytes / rate * 1e9 + arithmetic * pl.col("time_ns"))
    return found.with_columns(saving_ns=(pl.col("time_ns") - pl.col("fused_ns")).clip(lower_bound=0))


def _saving_ns(window: Window) -> float:
    found = chain_savings(window)
    return min(float(found["saving_ns"].sum()), float(window.exposed_ns(_members(window, found))))


@fact("unfused_chain_ceiling_ns", unit="ns")
def unfused_chain_ceiling_ns(window: Window) -> float:
    """Time that the steps would save with one fused kernel for each chain, with the waits for the host inside the chains."""
    found = chain_savings(window)
    members = _members(window, found)
    part = found.select(pl.min_horizontal(pl.col("fused_ns") / pl.col("time_ns"), 1.0).alias("part")).with_row_index("chain")
    gaps = attained.gaps_within_ns(window, attained.spans_of_groups(members, ["chain"]))
    return window.saving_ns(members.join(part, on="chain"), pl.col("time_ns") * pl.col("part")) + gaps


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
    fusable = (
        pl.col("family").is_in(FUSABLE) & pl.col("phase").ne_missing("optimizer") & ~pl.col("name").str.contains(roofline_chains.GENERATED)
    )
    time_ns = window.work().select(pl.col("time_ns").filter(fusable).sum()).item()
    return min(float(time_ns) / window.busy_ns, 1.0)
