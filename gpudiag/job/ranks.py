"""The ranks beside one another: what a mean step of each is made of, and which one stands for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import polars as pl

from gpudiag.job.clocks import Aligned
from gpudiag.job.waits import of_ranks
from gpudiag.model.breakdown import BUCKETS, BucketsNs
from gpudiag.model.job import RankRow
from gpudiag.model.rank import RankSummary
from gpudiag.units import format_ns


def rank_rows(
    summaries: Sequence[RankSummary], matched: pl.DataFrame, calls: pl.DataFrame, aligned: Aligned, unread: Mapping[int, str]
) -> tuple[RankRow, ...]:
    """Return a row for each rank, the unread ones included, by number. `matched`, `calls`: see job.waits."""
    waits = {int(row["rank"]): row for row in _in_messages(matched).iter_rows(named=True)}
    last = _arrived_last(matched, calls)
    rows = [_row(summary, waits.get(summary.rank), last.get(summary.rank), aligned) for summary in summaries]
    rows += [RankRow(rank=rank, unread=why) for rank, why in unread.items()]
    return tuple(sorted(rows, key=lambda row: row.rank))


def _row(summary: RankSummary, times: Mapping[str, int] | None, last_share: float | None, aligned: Aligned) -> RankRow:
    steps = summary.steps.height
    correction = aligned.corrections.get(summary.rank)
    row = RankRow(
        rank=summary.rank,
        device=summary.device,
        host=summary.host,
        steps=steps,
        arrived_last_share=last_share,
        clock_offset_ns=None if correction is None else correction.offset_ns,
        unread="" if steps else "no complete step was recorded",
    )
    if not steps:
        return row
    wall = int((summary.steps["end_ns"] - summary.steps["start_ns"]).sum())
    buckets = BucketsNs(**{name: round(int(summary.steps[name].sum()) / steps) for name in BUCKETS})
    row = msgspec.structs.replace(
        row, wall_ns=round(wall / steps), buckets_ns=buckets, exposed_communication_ns=buckets.exposed_communication
    )
    if times is None:
        return row
    exposed = min(times["exposed"], int(summary.steps["exposed_communication"].sum()))
    return msgspec.structs.replace(
        row,
        own_ns=round((wall - exposed) / steps),
        waiting_ns=round(times["wait"] / steps),
        exposed_waiting_ns=round(exposed / steps),
        transfer_ns=round(times["transfer"] / steps),
    )


def _in_messages(matched: pl.DataFrame) -> pl.DataFrame:
    """Return (rank, wait, exposed, transfer): time of the analysed steps spent in matched messages; of several at once only once."""
    until = pl.col("arrival_ns") + pl.col("wait_ns")
    sums = (
        _union("arrival_ns", until).alias("wait"),
        pl.col("exposed_wait_ns").sum().alias("exposed"),
        _union(until, "end_ns").alias("transfer"),
    )
    rows = (part.lazy().filter(pl.col("step").is_not_null() & pl.col("wait_ns").is_not_null()) for part in of_ranks(matched))
    return pl.concat([part.group_by("rank").agg(sums).collect() for part in rows])


def _union(start: pl.Expr | str, end: pl.Expr | str) -> pl.Expr:
    """Return the length of the union of [start, end) in a group."""
    begin = pl.col(start) if isinstance(start, str) else start
    until = pl.col(end) if isinstance(end, str) else end
    order = begin
    begins, ends = begin.sort_by(order), until.sort_by(order)
    reached = ends.cum_max().shift(1)
    return (ends - pl.max_horizontal(begins, reached)).clip(lower_bound=0).sum()


def _arrived_last(matched: pl.DataFrame, calls: pl.DataFrame) -> dict[int, float]:
    """Return the share of each rank's matched messages in which it came last; of ranks that came together the lowest one counts."""
    of_call = calls.drop_nulls("last").select("call", "last")
    rows = matched.select("call", "rank")
    rows = rows if of_call.height == calls.height else rows.join(of_call, on="call", how="semi")
    last = dict(of_call.group_by("last").len().iter_rows())
    return {rank: last.get(rank, 0) / count for rank, count in rows.group_by("rank").len().iter_rows()}


def shown_rank(rows: Sequence[RankRow]) -> tuple[int, str]:
    """Return the rank whose own analysis stands for all, and why: that of the median own time, the lower of the two in the middle.

    Without own times that of the median step. Raises ValueError where no rank was read.
    """
    read = [row for row in rows if row.wall_ns is not None]
    owned = [(row.own_ns, row.rank) for row in read if row.own_ns is not None]
    times = owned if len(owned) == len(read) else [(row.wall_ns or 0, row.rank) for row in read]
    if not times:
        raise ValueError("no rank was read")
    time, rank = sorted(times)[(len(times) - 1) // 2]
    if len(times) == 1:
        return rank, "the only rank that was read"
    what = "time of a step without waits for other ranks" if times is owned else "step"
    return rank, f"its {what}, {format_ns(time)}, is the median of {len(times)} ranks"
