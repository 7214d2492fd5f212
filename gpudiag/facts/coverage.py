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


# The op around a graph launch is not the op of the kernels that it replays: that stands in the pass that captured the graph.
_LOST = pl.col("replay").fill_null(False) & ~pl.col("mapped").fill_null(False)


def _share_of_work(window: Window, chosen: pl.Expr) -> float:
    """Return the part of the time in kernels (collectives, copies and memsets aside) of the analysed steps that is `chosen`."""
    work = pl.col("kind").is_in(["kernel", "cpu"]) & ~pl.col("collective").fill_null(False)
    time = pl.col("time_ns")
    total, part = window.kernels.select(total=time.filter(work).sum(), part=time.filter(work & chosen).sum()).row(0)
    require(total > 0, "no kernel ran in the analysed steps")
    return int(part) / int(total)


@fact("shaped_share", unit="share")
def shaped_share(window: Window) -> float:
    """Part of the time in kernels (collectives, copies and memsets aside) of the analysed steps whose op is known and has shapes."""
    return _share_of_work(window, pl.col("signature").is_not_null() & ~_LOST)


@fact("modelled_work_share", unit="share")
def modelled_work_share(window: Window) -> float:
    """Part of the time in kernels (collectives, copies and memsets aside) of the analysed steps whose cost is exact or derived.

    Unlike modelled_share it counts what could not be modelled too: graph replays, kernels without ops, ops without shapes.
    """
    return _share_of_work(window, pl.col("provenance").is_in(["exact", "derived"]))


@fact("attributed_work_share", unit="share")
def attributed_work_share(window: Window) -> float:
    """Part of the time in kernels (collectives, copies and memsets aside) of the analysed steps whose op is known.

    Replayed kernels count only where the pass that captured their graph tells.
    """
    return _share_of_work(window, pl.col("op").is_not_null() & ~_LOST)
