"""All ranks of one training, compared: one Job from the summaries of its ranks, with a row for each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import polars as pl

from gpudiag.errors import InputError
from gpudiag.job.clocks import AlignedClocks
from gpudiag.job.message_matching import Matches, match_messages
from gpudiag.job.message_table import stack_summaries
from gpudiag.job.messages import build_calls, build_matched, build_message_rows, find_traffic, iterate_ranks
from gpudiag.job.parallelism import find_balance, find_experts, find_pipeline, measure_spread
from gpudiag.job.straggler import find_straggler
from gpudiag.model.analysis import RankSummary
from gpudiag.model.job import Job, RankRow
from gpudiag.model.notices import Notice, NoticeCode, format_notice, make_notice
from gpudiag.model.timeline import BUCKETS, BucketsNs
from gpudiag.units import format_ns


def build_rank_rows(
    summaries: Sequence[RankSummary], matched: pl.DataFrame, calls: pl.DataFrame, aligned: AlignedClocks, unread: Mapping[int, str]
) -> tuple[RankRow, ...]:
    """Build a row for each rank, the unread ones included, by number. `matched`, `calls`: see job.messages."""
    # time of the analysed steps in matched messages; of several at once only once
    until = pl.col("arrival_ns") + pl.col("wait_ns")
    sums = (
        _measure_union(pl.col("arrival_ns"), until).alias("wait"),
        pl.col("exposed_wait_ns").sum().alias("exposed"),
        _measure_union(until, pl.col("end_ns")).alias("transfer"),
    )
    parts = (part.lazy().filter(pl.col("step").is_not_null() & pl.col("wait_ns").is_not_null()) for part in iterate_ranks(matched))
    times = pl.concat([part.group_by("rank").agg(sums).collect() for part in parts])
    waits = {int(row["rank"]): row for row in times.iter_rows(named=True)}
    # of ranks that came together the lowest one came last
    of_call = calls.drop_nulls("last").select("call", "last")
    comparable = matched.select("call", "rank")
    comparable = comparable if of_call.height == calls.height else comparable.join(of_call, on="call", how="semi")
    times_last = dict(of_call.group_by("last").len().iter_rows())
    last = {rank: times_last.get(rank, 0) / count for rank, count in comparable.group_by("rank").len().iter_rows()}
    rows = [_build_rank_row(summary, waits.get(summary.rank), last.get(summary.rank), aligned) for summary in summaries]
    rows += [RankRow(rank=rank, unread=why) for rank, why in unread.items()]
    return tuple(sorted(rows, key=lambda row: row.rank))


def _build_rank_row(summary: RankSummary, times: Mapping[str, int] | None, last_share: float | None, aligned: AlignedClocks) -> RankRow:
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


def _measure_union(begin: pl.Expr, until: pl.Expr) -> pl.Expr:
    begins, ends = begin.sort_by(begin), until.sort_by(begin)
    return (ends - pl.max_horizontal(begins, ends.cum_max().shift(1))).clip(lower_bound=0).sum()


def choose_shown_rank(rows: Sequence[RankRow]) -> tuple[int, str]:
    """Choose the rank whose own analysis stands for all, and why: that of the median own time, the lower of the two in the middle.

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
    place = "the median" if len(times) % 2 else "the lower of the two around the median"
    return rank, f"its {what}, {format_ns(time)}, is {place} of {len(times)} ranks"


MOST_WORLD = 2**20
"""More than any job has: a damaged header."""

_MOST_NAMED = 8


def compare_rank_summaries(summaries: Sequence[RankSummary], unread: Mapping[int, str]) -> Job:
    """Return what the comparison of the ranks tells; `unread`: rank -> why it could not be read.

    Raises InputError where no rank holds a complete step, or a rank comes twice.
    """
    summaries = stack_summaries(summaries)
    if not summaries:
        raise InputError("no rank could be read", "give the traces of at least one rank")
    twice = sorted(rank for rank, count in Counter(summary.rank for summary in summaries).items() if count > 1)
    if twice:
        raise InputError(f"rank {twice[0]} comes twice", "give each rank of one job once")
    matches = match_messages(summaries)
    matched = build_matched(summaries, matches)
    # what the job needs of these columns stands in `matched`, and what follows needs the memory
    summaries.messages = summaries.messages.drop("exposed_by", "start", "end", "seq", "number")
    matches = matches._replace(rows=matches.rows.select("call", "kind", "group", "step"))
    calls = build_calls(matched)
    rows = build_rank_rows(summaries, matched, calls, matches.aligned, unread)
    if all(row.wall_ns is None for row in rows):
        raise InputError("no rank holds a complete step", "record at least one step on each rank")
    shown, reason = choose_shown_rank(rows)
    worlds = [summary.world_size for summary in summaries if summary.world_size]
    world = max((size for size in worlds if size <= MOST_WORLD), default=None)
    told, more = build_message_rows(summaries, matches, calls)
    straggler, unnamed = find_straggler(summaries, matched, rows)
    notices = _list_notices(summaries, matches, more, worlds)
    wall, own, exposed = (
        {row.rank: float(value) for row in rows if (value := getattr(row, name)) is not None}
        for name in ("wall_ns", "own_ns", "exposed_communication_ns")
    )
    return Job(
        ranks=rows,
        world_size=world,
        shown_rank=shown,
        shown_reason=reason,
        wall=measure_spread(wall),
        own=measure_spread(own) if own else None,
        exposed_communication=measure_spread(exposed),
        clocks=matches.aligned.clocks,
        messages=told,
        straggler=straggler,
        no_straggler=format_notice(unnamed) if unnamed else "",
        notice=unnamed,
        pipeline=find_pipeline(summaries, matched),
        experts=find_experts(summaries, matched),
        balance=find_balance(summaries),
        traffic=find_traffic(summaries, world),
        warnings=tuple(map(format_notice, notices)),
        notices=notices,
    )


def _list_notices(summaries: Sequence[RankSummary], matches: Matches, more: int, worlds: Sequence[int]) -> tuple[Notice, ...]:
    found = []
    if len(set(worlds)) > 1:
        sizes = " and ".join(str(world) for world in sorted(set(worlds)))
        found.append(make_notice(NoticeCode.WORLD_SIZES_DIFFER, sizes=sizes))
    read, world = {summary.rank for summary in summaries}, max(worlds, default=0)
    missing = [rank for rank in range(world) if rank not in read] if world <= MOST_WORLD else []
    if missing and matches.rows["call"].count():
        others = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:_MOST_NAMED]))}{others}"
        found.append(make_notice(NoticeCode.RANKS_NOT_READ, ranks=names, count=len(missing)))
    untold = matches.rows.filter(matches.rows["group"].is_null() & matches.rows["step"].is_not_null()).height
    if untold:
        found.append(make_notice(NoticeCode.MESSAGES_UNTOLD, messages=untold))
    if more:
        found.append(make_notice(NoticeCode.MESSAGES_UNLISTED, kinds=more))
    return tuple(found)
