"""Exchanges of a mixture of experts: what they take, and how evenly the experts of the ranks are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from gpudiag.facts.exchange import EMBEDDING, EXPERTS
from gpudiag.job.spread import spread
from gpudiag.job.stack import CODES, Stack, stacked
from gpudiag.model.job import Experts
from gpudiag.model.rank import RankSummary

ALL_TO_ALL = "all_to_all"


def find_experts(summaries: Sequence[RankSummary], matched: pl.DataFrame) -> Experts | None:
    """Return what all-to-alls of experts take; None where there are none, or they carry something else (rows of embedding tables)."""
    stack = stacked(summaries)
    sent = _all_to_alls(stack)
    walls = {summary.rank: summary.wall_ns for summary in stack if summary.wall_ns}
    if not sent.height or not walls or not _carry_tokens(stack):
        return None
    loads = _loads(stack, sent)
    most = max(loads.values(), default=0.0)
    return Experts(
        all_to_all_share=_mean_share(sent.group_by("rank").agg(pl.col("exposed_ns").sum().alias("time")), walls),
        waiting_share=_waiting(matched, walls),
        received=spread(loads) if loads else None,
        imbalance_share=1 - sum(loads.values()) / len(loads) / most if most else None,
    )


def _all_to_alls(stack: Stack) -> pl.DataFrame:
    """Return the all-to-alls of the analysed steps with rank, and turn: which of its step."""
    found = stack.messages.filter((pl.col("kind") == CODES[ALL_TO_ALL]) & pl.col("step").is_not_null())
    found = found.select(pl.col("rank", "step", "sent", "received", "exposed_ns").cast(pl.Int64))
    return found.with_columns(turn=pl.int_range(pl.len()).over("rank", "step"))


def _carry_tokens(stack: Stack) -> bool:
    """Return whether the exchanges are those of experts: by the operators around them, else by uneven splits without embedding tables."""
    names = pl.concat([summary.ops["name"] for summary in stack]).unique()
    if names.str.contains(EMBEDDING).any():
        return False
    uneven = any(found.uneven for found in stack.splits.values())
    return bool(names.str.contains(EXPERTS).any()) or uneven


def _loads(summaries: Sequence[RankSummary], sent: pl.DataFrame) -> dict[int, float]:
    """Return the elements that each rank receives in a step for its experts; empty where sizes were not recorded.

    An exchange and its return carry the same tokens: on the way to the experts what ranks receive differs more than what they send, on the
    way back less. The ways to the experts count.
    """
    if sent["received"].null_count() or sent["sent"].null_count():
        return {}
    steps = {summary.rank: summary.steps.height for summary in summaries}
    each = sent.group_by("turn", "rank").agg(pl.col("received", "sent").mean())
    lack = [(1 - pl.col(name).mean() / pl.col(name).max()).fill_nan(0.0).alias(name) for name in ("received", "sent")]
    there = each.group_by("turn").agg(lack).filter(pl.col("received") >= pl.col("sent"))["turn"]
    counted = sent.filter(pl.col("turn").is_in(there.implode())).group_by("rank").agg(pl.col("received").sum())
    return {rank: received / steps[rank] for rank, received in counted.sort("rank").iter_rows() if steps[rank]}


def _waiting(matched: pl.DataFrame, walls: dict[int, int]) -> float | None:
    """Return the share of the step spent in matched all-to-alls before the last rank has arrived; None where none could be matched."""
    found = matched.filter((pl.col("kind") == ALL_TO_ALL) & pl.col("step").is_not_null() & pl.col("exposed_wait_ns").is_not_null())
    return _mean_share(found.group_by("rank").agg(pl.col("exposed_wait_ns").sum().alias("time")), walls) if found.height else None


def _mean_share(times: pl.DataFrame, walls: dict[int, int]) -> float:
    """Return the mean over the ranks of `time` (columns rank, time) over the wall time; a rank without a row spent none."""
    spent: dict[int, int] = dict(times.select("rank", "time").iter_rows())
    return sum(spent.get(rank, 0) / wall for rank, wall in walls.items()) / len(walls)
