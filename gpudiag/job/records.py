"""The step records of all ranks of a job side by side."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from gpudiag.model.rank import RankSummary
from gpudiag.timeline.rank_steps import COLUMNS, RankSteps, rank_steps, thinned


def steps_of(summaries: Sequence[RankSummary]) -> RankSteps | str:
    """Return the unprofiled steps that all ranks with records have, or why they cannot be compared."""
    recorded = [(summary.rank, summary.records) for summary in summaries if summary.records is not None]
    rows = sum(records.height for _, records in recorded)
    frames = [thinned(records.select(COLUMNS), rows).with_columns(rank=pl.lit(rank, dtype=pl.Int64)) for rank, records in recorded]
    return rank_steps(pl.concat(frames)) if frames else "no records of all steps: a bundle holds them (gpudiag run torchrun ...)"
