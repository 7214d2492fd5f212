"""The work of the ranks' batches side by side, and what equal work would give.

Source of the what-if: Wang et al. 2024, FlexSP (arXiv:2412.01523), which balances sequences of all lengths over the devices by their cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from gpudiag.job.pipeline import is_pipeline
from gpudiag.job.records import steps_of
from gpudiag.job.spread import spread
from gpudiag.model.job import Balance
from gpudiag.model.rank import RankSummary
from gpudiag.timeline.rank_steps import Floats, RankSteps, correlation, uneven

_BUSY = ("compute", "memory", "overhead", "unknown")


def find_balance(summaries: Sequence[RankSummary]) -> Balance | None:
    """Return how evenly the work of the batches lies on the ranks; None where no measure of it is known, or stages of a pipeline differ.

    By positions of the batches in the records of all steps, else by the matrix FLOP of the profiled steps.
    """
    if len(summaries) < 2 or is_pipeline(summaries):
        return None
    return _by_positions(summaries) or _by_flops(summaries)


def _by_positions(summaries: Sequence[RankSummary]) -> Balance | None:
    steps = steps_of(summaries)
    if not isinstance(steps, RankSteps) or steps.positions is None:
        return None
    saved, wall = steps.balanced, steps.wall.max(axis=1)
    return Balance(
        measure="positions",
        per_rank=spread(dict(zip(steps.ranks, steps.positions.mean(axis=0).tolist(), strict=True))),
        imbalance_share=float(steps.imbalance.mean()),
        saved_ns=round(float(saved.mean())),
        saved_share=float(saved.sum() / wall.sum()),
        correlation=steps.follows_positions,
    )


def _by_flops(summaries: Sequence[RankSummary]) -> Balance | None:
    """Return the balance by matrix FLOP: in a step, the busiest rank would take less of its busy time by mean over largest."""
    count = min(summary.steps.height for summary in summaries)
    known = all(not summary.steps["matrix_flops"].null_count() for summary in summaries)
    if not count or not known:
        return None
    frames = [summary.steps.head(count) for summary in summaries]
    work, wall = _array(frames, pl.col("matrix_flops")), _array(frames, pl.col("end_ns") - pl.col("start_ns"))
    busy = _array(frames, pl.sum_horizontal(_BUSY))
    if not (work.max(axis=1) > 0).all() or not wall.sum():
        return None
    saved = np.minimum(uneven(work), uneven(busy)) * busy.max(axis=1)
    return Balance(
        measure="matrix FLOP",
        per_rank=spread(dict(zip([summary.rank for summary in summaries], work.mean(axis=0).tolist(), strict=True))),
        imbalance_share=float(uneven(work).mean()),
        saved_ns=round(float(saved.mean())),
        saved_share=float(saved.sum() / wall.max(axis=1).sum()),
        correlation=correlation(work, busy),
    )


def _array(frames: list[pl.DataFrame], values: pl.Expr) -> Floats:
    """Return `values` of the steps of each rank as (steps x ranks)."""
    return np.column_stack([frame.select(values.cast(pl.Float64)).to_series().to_numpy() for frame in frames])
