"""How much of the kernel time is linked and modelled: the number that is shown first."""

from __future__ import annotations

import polars as pl

from gpudiag.model.analysis import Coverage
from gpudiag.model.trace import Trace


def coverage(trace: Trace) -> Coverage:
    """Return the coverage of the kernels of `trace` (stage 'cost'). Shares are of summed kernel time, None where there is none."""
    kernels = trace.kernels
    total = _sum(kernels, pl.lit(True))
    shaped = pl.col("owner").is_not_null()
    work = pl.col("kind").is_in(["kernel", "cpu"]) & ~pl.col("collective")
    attributable = _sum(kernels, work & shaped)
    modelled = _sum(kernels, work & shaped & pl.col("provenance").is_in(["exact", "derived"]))
    generic = _sum(kernels, work & shaped & (pl.col("provenance") == "generic"))
    on_device = pl.col("kind") != "cpu"
    unlaunched = on_device & pl.col("launch").is_null()
    return Coverage(
        kernels=kernels.height,
        kernel_ns=total,
        attributable_ns=attributable,
        linked_share=_share(_sum(kernels, pl.col("op").is_not_null()), total),
        modelled_share=_share(modelled, attributable),
        generic_share=_share(generic, attributable),
        unknown_share=_share(attributable - modelled - generic, attributable),
        modelled_share_of_all=_share(modelled, total),
        without_launch_share=_share(_sum(kernels, unlaunched), total),
        outside_ops_share=_share(_sum(kernels, on_device & ~unlaunched & pl.col("op").is_null()), total),
        without_shapes_share=_share(_sum(kernels, work & pl.col("op").is_not_null() & ~shaped & ~pl.col("replay")), total),
        replay_share=_share(_sum(kernels, pl.col("replay")), total),
    )


def _sum(kernels: pl.DataFrame, chosen: pl.Expr) -> int:
    return int(kernels.filter(chosen)["busy_ns"].sum())


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
