"""Facts about gathers, scatters and embedding gradients that reach little of the bandwidth (MEM-09)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.attained import MEMORY_SHARE_OF_PEAK
from gpudiag.facts.registry import NotKnownError, fact
from gpudiag.facts.window import Window

USEFUL_SHARE = 0.3
"""Useful bytes below this share of the bandwidth are irregular access (rules.md MEM-09)."""

_NAMES = [
    "embedding_dense_backward",
    "_embedding_bag_dense_backward",
    "_embedding_bag",
    "index_put_",
    "_index_put_impl_",
    "index_add_",
    "index_add",
    "scatter_add_",
    "scatter_add",
    "scatter_reduce",
    "scatter_reduce_",
    "gather",
    "gather_backward",
    "index",
    "index_select",
    "index_select_backward",
    "embedding",
]
IRREGULAR = tuple(f"aten::{name}" for name in _NAMES)


def irregular_work(window: Window) -> pl.DataFrame:
    """Return the kernels of look-ups, scatters and their gradients whose useful bytes reach less than 30 % of the bandwidth."""
    work = window.work(shapes=True).filter(pl.col("op_name").is_in(IRREGULAR) & pl.col("bytes_moved").is_not_null())
    limit = USEFUL_SHARE * window.bandwidth / 1e9
    slow = work.group_by("op_name", "signature").agg((pl.col("bytes_moved").sum() < limit * pl.col("time_ns").sum()).alias("slow"))
    return work.join(slow, on=["op_name", "signature"], nulls_equal=True).filter("slow")


@fact("irregular_share", unit="share")
def irregular_share(window: Window) -> float:
    """Time in look-ups, gathers, scatters and embedding gradients below 30 % of the bandwidth (useful bytes), over the wall time."""
    return window.share_of_wall(irregular_work(window))


@fact("irregular_rate_share", unit="share")
def irregular_rate_share(window: Window) -> float:
    """Useful bytes of these ops over what the bandwidth would move in their time."""
    work = irregular_work(window)
    if not work.height:
        raise NotKnownError("no look-up or scatter runs below 30 % of the bandwidth")
    return float(work["bytes_moved"].sum()) / (window.bandwidth * float(work["time_ns"].sum()) / 1e9)


@fact("irregular_saving_ns", unit="ns")
def irregular_saving_ns(window: Window) -> float:
    """Time that these ops would save with their useful bytes at 85 % of the bandwidth."""
    floor = pl.col("bytes_moved") / (MEMORY_SHARE_OF_PEAK * window.bandwidth) * 1e9
    return window.saving_ns(irregular_work(window), floor)
