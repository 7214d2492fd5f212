"""All ranks of one training, compared: one Job from the summaries of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpudiag.errors import InputError
from gpudiag.job.balance import find_balance
from gpudiag.job.experts import find_experts
from gpudiag.job.match import Matches, match
from gpudiag.job.messages import message_rows
from gpudiag.job.pipeline import find_pipeline
from gpudiag.job.ranks import rank_rows, shown_rank
from gpudiag.job.spread import spread
from gpudiag.job.stack import stacked
from gpudiag.job.straggler import find_straggler
from gpudiag.job.traffic import find_traffic
from gpudiag.job.waits import call_table, matched_table
from gpudiag.model.job import Job, RankRow, Spread
from gpudiag.model.rank import RankSummary

MOST_WORLD = 2**20
"""More than any job has: a damaged header."""

_NAMED = 8
"""Ranks that a warning names."""


def find_job(summaries: Sequence[RankSummary], unread: Mapping[int, str]) -> Job:
    """Return what the comparison of the ranks tells; `unread`: rank -> why it could not be read.

    Raises InputError where no rank holds a complete step, or a rank comes twice.
    """
    summaries = stacked(summaries)
    _check(summaries)
    matches = match(summaries)
    matched = matched_table(summaries, matches)
    summaries.forget("exposed_by", "start", "end", "seq", "number")  # what the job needs of them stands in `matched`
    matches = matches._replace(rows=matches.rows.select("call", "kind", "group", "step"))
    calls = call_table(matched)
    rows = rank_rows(summaries, matched, calls, matches.aligned, unread)
    if all(row.wall_ns is None for row in rows):
        raise InputError("no rank holds a complete step", "record at least one step on each rank")
    shown, reason = shown_rank(rows)
    worlds = [summary.world_size for summary in summaries if summary.world_size]
    world = max((size for size in worlds if size <= MOST_WORLD), default=None)
    told, more = message_rows(summaries, matches, calls)
    straggler, no_straggler = find_straggler(summaries, matched, rows)
    own = {row.rank: float(row.own_ns) for row in rows if row.own_ns is not None}
    return Job(
        ranks=rows,
        world_size=world,
        shown_rank=shown,
        shown_reason=reason,
        wall=_over(rows, "wall_ns"),
        own=spread(own) if own else None,
        exposed_communication=_over(rows, "exposed_communication_ns"),
        clocks=matches.aligned.clocks,
        messages=told,
        straggler=straggler,
        no_straggler=no_straggler,
        pipeline=find_pipeline(summaries, matched),
        experts=find_experts(summaries, matched),
        balance=find_balance(summaries),
        traffic=find_traffic(summaries, world),
        warnings=_warnings(summaries, matches, more, worlds),
    )


def _check(summaries: Sequence[RankSummary]) -> None:
    if not summaries:
        raise InputError("no rank could be read", "give the traces of at least one rank")
    ranks = [summary.rank for summary in summaries]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if len(set(ranks)) < len(ranks) else []
    if twice:
        raise InputError(f"rank {twice[0]} comes twice", "give each rank of one job once")


def _over(rows: Sequence[RankRow], name: str) -> Spread:
    return spread({row.rank: float(getattr(row, name)) for row in rows if getattr(row, name) is not None})


def _warnings(summaries: Sequence[RankSummary], matches: Matches, more: int, worlds: Sequence[int]) -> tuple[str, ...]:
    """Return what limits the comparison."""
    found = []
    if len(set(worlds)) > 1:
        sizes = " and ".join(str(world) for world in sorted(set(worlds)))
        found.append(f"the ranks say that they are of jobs of {sizes} ranks: they may not belong together")
    missing = _missing(summaries, max(worlds, default=0))
    if missing and matches.rows["call"].count():
        found.append(
            f"{missing} {'was' if missing.startswith('rank ') else 'were'} not read: what the others wait for them counts as transfer"
        )
    untold = matches.rows.filter(matches.rows["group"].is_null() & matches.rows["step"].is_not_null()).height
    if untold:
        found.append(f"of {untold:,} messages it was not recorded between which ranks they go: they are not compared")
    if more:
        found.append(f"{more:,} more kinds of messages between groups of ranks are not listed")
    return tuple(found)


def _missing(summaries: Sequence[RankSummary], world: int) -> str:
    """Return 'rank 3' or 'ranks 1, 2 and 5 more', the ranks of the job that were not read; '' where there is none."""
    read = {summary.rank for summary in summaries}
    lacking = [rank for rank in range(world) if rank not in read] if world <= MOST_WORLD else []
    if not lacking:
        return ""
    more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
    return f"rank{'s' if len(lacking) > 1 else ''} {', '.join(map(str, lacking[:_NAMED]))}{more}"
