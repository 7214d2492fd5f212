"""The rank for which the others wait: which, since when, and why."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import polars as pl

from gpudiag.job.cause import find_cause
from gpudiag.job.differences import of_buckets, of_parts
from gpudiag.job.lateness import Late, late_ranks, nobody
from gpudiag.job.records import steps_of
from gpudiag.model.job import RankRow, Straggler
from gpudiag.model.rank import RankSummary
from gpudiag.timeline.rank_steps import MIN_STEPS, Floats, RankSteps

MIN_PROFILED = 3
"""Fewer profiled steps tell a habit from chance badly."""


class _Source(msgspec.Struct, frozen=True):
    """Own times that were compared."""

    ranks: list[int]
    numbers: list[int] | None
    """Of the steps in the whole training; None: not known."""
    own: Floats
    least: int
    """Steps in which a rank has to be seen."""
    records: RankSteps | None = None
    """Where the own times are those of the step records."""


def find_straggler(summaries: Sequence[RankSummary], matched: pl.DataFrame, rows: Sequence[RankRow]) -> tuple[Straggler | None, str]:
    """Return the rank for which the others wait, or None and why there is none.

    Judged by the records of all steps where the ranks have them. They do not show waits within the forward pass (sharded parameters,
    SyncBatchNorm), so where they show no late rank the profiled steps are asked, by their wall time less the waits in matched messages.
    """
    reasons = []
    records = steps_of(summaries)
    for source in (_by_records(records), _by_messages(summaries, matched)):
        if isinstance(source, str):
            reasons.append(source)
            continue
        late = late_ranks(source.own, source.least)
        if late:
            return _straggler(summaries, rows, source, late, records), ""
        reasons.append(nobody(source.own, source.ranks))
    judged = [reason for reason in reasons if reason.startswith("no rank is late")]
    return None, (judged or ["; ".join(reversed(reasons))])[0]


def _by_records(found: RankSteps | str) -> _Source | str:
    """Return the own times of all unprofiled steps; why there are none."""
    return found if isinstance(found, str) else _Source(found.ranks, found.numbers.tolist(), found.own, MIN_STEPS, found)


def _by_messages(summaries: Sequence[RankSummary], matched: pl.DataFrame) -> _Source | str:
    """Return the own times of the profiled steps: wall less the exposed waits in matched messages; why there are none."""
    waits = matched.select("rank", "step", "exposed_wait_ns").drop_nulls()
    if not waits.height:
        return "no message of the analysed steps could be matched between the ranks"
    steps = _profiled_steps(summaries)
    waits = waits.group_by("rank", "step").agg(waits=pl.col("exposed_wait_ns").sum()).with_columns(pl.col("rank", "step").cast(pl.Int64))
    exposed = pl.min_horizontal(pl.col("waits").fill_null(0), "exposed_communication")
    steps = steps.join(waits, on=["rank", "step"], how="left").with_columns(own=pl.col("wall") - exposed)
    ranks: list[int] = sorted(steps["rank"].unique().to_list())
    steps = steps.filter(pl.len().over("key") == len(ranks)).sort("key", "rank")
    if len(ranks) < 2 or steps.height < MIN_PROFILED * len(ranks):
        return f"fewer than {MIN_PROFILED} steps that all ranks profiled"
    own = np.asarray(steps["own"].cast(pl.Float64).clip(lower_bound=0).to_numpy()).reshape(-1, len(ranks))
    numbers = steps["number"].to_list()[:: len(ranks)]
    return _Source(ranks, None if None in numbers else numbers, own, MIN_PROFILED)


def _profiled_steps(summaries: Sequence[RankSummary]) -> pl.DataFrame:
    """Return the analysed steps of all ranks (rank, step, number, wall, exposed_communication, key).

    Equal keys are the same step: by number, else by place.
    """
    wall = (pl.col("end_ns") - pl.col("start_ns")).alias("wall")
    frames = [
        summary.steps.select(pl.lit(summary.rank).alias("rank"), "number", "exposed_communication", wall).with_row_index("step")
        for summary in summaries
    ]
    every = pl.concat(frames).with_columns(pl.col("step", "rank").cast(pl.Int64))
    numbered = not every["number"].null_count() and not every.select("rank", "number").is_duplicated().any()
    return every.with_columns(key=pl.col("number" if numbered else "step"))


def _straggler(
    summaries: Sequence[RankSummary], rows: Sequence[RankRow], source: _Source, late: list[Late], records: RankSteps | str
) -> Straggler:
    first = late[0]
    rank = source.ranks[first.column]
    since = source.numbers[first.begin] if source.numbers is not None and first.begin else None
    by_ns = _excess_ns(source, first)
    before = _recorded_before(summaries, rank, since)
    profile = [] if before else of_buckets(summaries, rows, rank)
    parts = [] if source.records is None else of_parts(source.records, first.column, first.begin)
    begin = first.begin if source.records is not None else 0
    steps = records if isinstance(records, RankSteps) and rank in records.ranks else None
    cause, reason, differences = find_cause(summaries, steps, (rank, begin, by_ns), profile, parts)
    shared, machine = _shared(summaries, [source.ranks[other.column] for other in late])
    return Straggler(
        rank=rank,
        excess_ns=round(by_ns),
        excess_share=by_ns / max(first.excess_ns / first.share + first.excess_ns - by_ns, 1.0),
        last_share=first.last_share,
        late_share=first.late_share,
        since_step=since,
        cause="other work on its machine" if machine and cause == "host" else cause,
        reason=f"{reason}{shared}{' Its profiled steps were recorded before.' if before else ''}",
        differences=differences,
        whole_run=source.records is not None,
    )


def _excess_ns(source: _Source, late: Late) -> float:
    """Return by how much the rank is late in ns a step.

    Records show no backward pass without waits but the shortest, which is the late rank's: where its forward pass is slower than the
    others', its backward pass counts as slower by the same factor.
    """
    if source.records is None:
        return late.excess_ns
    forward = source.records.column("forward_ns")[late.begin :]
    if np.isnan(forward).any():
        return late.excess_ns
    usual = np.median(forward, axis=0)
    others = float(np.median(np.delete(usual, late.column)))
    slower = max(0.0, 1 - others / max(float(usual[late.column]), 1.0))
    return late.excess_ns + slower * float(np.median(source.records.least_backward[late.begin :]))


def _recorded_before(summaries: Sequence[RankSummary], rank: int, since: int | None) -> bool:
    """Return whether the profiled steps of `rank` were recorded before it was late: what they say of it is not why."""
    numbers = [summary.steps["number"].drop_nulls().min() for summary in summaries if summary.rank == rank and summary.steps.height]
    return since is not None and any(isinstance(first, int) and first < since for first in numbers)


def _shared(summaries: Sequence[RankSummary], late: list[int]) -> tuple[str, bool]:
    """Return a sentence on the other late ranks, and whether all late ranks are those of one machine among several."""
    hosts = {summary.rank: summary.host for summary in summaries}
    host = hosts.get(late[0], "")
    there = {rank for rank, name in hosts.items() if name == host}
    machine = bool(host) and len(set(hosts.values())) > 1 and len(there) > 1 and set(late) == there
    if len(late) == 1:
        return "", False
    others = f"Rank {late[1]} is" if len(late) == 2 else f"{len(late) - 1} other ranks are"
    where = f", as all ranks of its machine ({host})" if machine else f", on its machine ({host})" if host and set(late) <= there else ""
    return f" {others} late as well{where}.", machine
