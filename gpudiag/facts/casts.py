"""Facts about copies that only change the type (MEM-06)."""

from __future__ import annotations

import polars as pl

from gpudiag.facts.attention import unfused_attention
from gpudiag.facts.composites import composites
from gpudiag.facts.registry import NotKnownError, fact
from gpudiag.facts.vocabulary import vocabulary_work
from gpudiag.facts.window import Window


def casts(window: Window) -> pl.DataFrame:
    """Return the kernels that only change the type of a tensor; those of the optimizer's and those of MEM-02 to MEM-04 aside."""
    taken = pl.concat([made(window)["id"] for made in (vocabulary_work, composites, unfused_attention)]).implode()
    work = window.work(shapes=True).filter((pl.col("copy_kind") == "cast") & (pl.col("numel") > 1) & ~pl.col("id").is_in(taken))
    return work.filter(~pl.col("phase").fill_null("other").is_in(["optimizer", "data"]))


@fact("cast_share", unit="share")
def cast_share(window: Window) -> float:
    """Time in copies that only change the type of a tensor, optimizer aside, over the wall time of the analysed steps."""
    return window.share_of_wall(casts(window))


@fact("casts_per_step", unit="count")
def casts_per_step(window: Window) -> float:
    """Copies that only change the type of a tensor, optimizer aside, in an analysed step."""
    if not window.steps.height:
        raise NotKnownError("no complete step was recorded")
    return casts(window).height / window.steps.height


@fact("without_casts_ns", unit="ns")
def without_casts_ns(window: Window) -> float:
    """Time that the analysed steps would save without copies that only change the type: replayed, else the time that only they fill."""
    return window.saving_ns(casts(window), pl.lit(0.0))
