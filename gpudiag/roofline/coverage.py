"""How much of the kernel time is linked and modelled: the number that is shown first."""

from __future__ import annotations

import polars as pl

from gpudiag.model.analysis import Coverage
from gpudiag.model.trace import Trace

_WHERE = ("copy", "collective", "without_launch", "attributable", "replay", "outside_ops", "without_shapes")
"""Where a kernel stands on its way to a cost; exactly one for each, so that the shares sum to 1."""


def coverage(trace: Trace) -> Coverage:
    """Return the coverage of the kernels of `trace` (stage 'cost'). Shares are of summed kernel time, None where there is none."""
    kernels = trace.kernels.select("busy_ns", "provenance", "op", "mapped", where=_where())
    total = _sum(kernels, pl.lit(True))
    attributable = _sum(kernels, pl.col("where") == "attributable")
    modelled = _sum(kernels, (pl.col("where") == "attributable") & pl.col("provenance").is_in(["exact", "derived"]))
    generic = _sum(kernels, (pl.col("where") == "attributable") & (pl.col("provenance") == "generic"))
    parts = {f"{word}_share": _share(_sum(kernels, pl.col("where") == word), total) for word in _WHERE}
    return Coverage(
        kernels=kernels.height,
        kernel_ns=total,
        attributable_ns=attributable,
        linked_share=_share(_sum(kernels, pl.col("op").is_not_null()), total),
        modelled_share=_share(modelled, attributable),
        generic_share=_share(generic, attributable),
        unknown_share=_share(attributable - modelled - generic, attributable),
        modelled_share_of_all=_share(modelled, total),
        mapped_replay_share=_share(_sum(kernels, pl.col("mapped")), total),
        **parts,
    )


def _where() -> pl.Expr:
    chain = (
        (pl.col("kind").is_in(["memcpy", "memset"]), "copy"),
        (pl.col("collective"), "collective"),
        (pl.col("owner").is_not_null(), "attributable"),
        ((pl.col("kind") != "cpu") & pl.col("launch").is_null(), "without_launch"),
        (pl.col("replay") & ~pl.col("mapped"), "replay"),
        (pl.col("op").is_null(), "outside_ops"),
    )
    found = pl.lit("without_shapes")
    for condition, word in reversed(chain):
        found = pl.when(condition).then(pl.lit(word)).otherwise(found)
    return found


def _sum(kernels: pl.DataFrame, chosen: pl.Expr) -> int:
    return int(kernels.select(pl.col("busy_ns").filter(chosen).sum()).item())


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
