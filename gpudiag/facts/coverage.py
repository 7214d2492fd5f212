"""Facts about how much of the kernel time is linked and modelled."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.registry import NotKnownError, fact, require
from gpudiag.facts.window import Window


@fact("modelled_share", unit="share")
def modelled_share(window: Window) -> float:
    """Part of the attributable kernel time whose cost is exact or derived."""
    share = window.analysis.coverage.modelled_share
    if share is None:
        raise NotKnownError("no kernel time that could have a cost model")
    return share


@fact("linked_share", unit="share")
def linked_share(window: Window) -> float:
    """Part of the kernel time that is linked to the op that launched it."""
    share = window.analysis.coverage.linked_share
    if share is None:
        raise NotKnownError("no kernel time was recorded")
    return share


@fact("shaped_share", unit="share")
def shaped_share(window: Window) -> float:
    """Part of the time in kernels (collectives, copies and memsets aside) of the analysed steps whose op has recorded shapes."""
    work = window.kernels.filter(pl.col("kind").is_in(["kernel", "cpu"]) & ~pl.col("collective").fill_null(False))
    total = int(work["time_ns"].sum())
    require(total > 0, "no kernel ran in the analysed steps")
    return int(work.filter(pl.col("signature").is_not_null())["time_ns"].sum()) / total
