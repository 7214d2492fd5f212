"""The straggler: the rank for which the others wait, since when, and why."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import polars as pl

from gpudiag.arrays import Floats
from gpudiag.job.rank_summary import read_rank_steps
from gpudiag.job.straggler_cause import compare_buckets, compare_parts, find_cause
from gpudiag.model.analysis import RankSummary
from gpudiag.model.job import RankRow, Straggler
from gpudiag.model.notices import Notice, NoticeCode, make_notice
from gpudiag.timeline.history import MIN_STEPS, RankSteps
from gpudiag.units import format_share

LEAST_ON_A_SIDE = 5


def find_rise(series: Floats) -> int | None:
    """Find the index from which on `series` is higher than before; None where no split tells the two sides apart.

    The split that maximises the statistic of Mann and Whitney (1947), standardised for its place: by ranks of the values, so that a few
    very slow steps move it little. From there to the split that leaves fewest values on the wrong side of the middle of both medians.
    """
    count = series.size
    if count < 2 * LEAST_ON_A_SIDE:
        return None
    ordered = np.sort(series)
    ranks = (np.searchsorted(ordered, series, "left") + np.searchsorted(ordered, series, "right") + 1) / 2
    before = np.arange(LEAST_ON_A_SIDE, count - LEAST_ON_A_SIDE + 1)
    lack = before * (count + 1) / 2 - np.cumsum(ranks)[before - 1]
    sure = lack / np.sqrt(before * (count - before) * (count + 1) / 12)
    # Least standard deviations of the two-sample statistic at the split. What it finds is verified by how late the rank is on both sides
    if sure.max() < 3.0:
        return None
    split = int(before[sure.argmax()])
    above = series > (np.median(series[:split]) + np.median(series[split:])) / 2
    right = np.concatenate(([0], np.cumsum(~above))) - np.concatenate(([0], np.cumsum(above)))
    return int(right.argmax())


MIN_SHARE = 0.05
"""A rank is late in a step where it takes this much longer than the median of the others (heuristic: machines differ by less)."""

HABIT_SHARE = 0.7
"""Share of the steps in which a straggler is late (as rule DST-06): of two ranks that take turns each is in half."""

SURE_LATE = 4.0
"""Its mean lateness in standard errors: by chance, one of some hundred ranks reaches 4."""

FEW_STEPS = 10
"""Fewer steps have no robust deviation of their own: that of all ranks is taken."""


class LateRank(msgspec.Struct, frozen=True):
    """A rank that is late for long. Times in ns."""

    column: int
    begin: int
    """Row of the first step in which it is late."""
    excess_ns: float
    """Mean of its own time less the median of the others'."""
    share: float
    late_share: float
    last_share: float


def find_late_ranks(own: Floats, least: int) -> list[LateRank]:
    """Find the ranks that are late for long, the latest first, from their own times (steps x ranks).

    `least`: steps in which a rank has to be seen. Ranks that take turns are not among them, nor ranks that differ as the others do.
    """
    if own.shape[0] < least or own.shape[1] < 2:
        return []
    others = compute_others_median(own)
    late = []
    for column in range(own.shape[1]):
        base = others[:, column]
        lateness = own[:, column] - base
        begin = find_rise(lateness) or 0
        if begin and len(lateness) - begin >= least:
            was_late = float((lateness[:begin] > MIN_SHARE * base[:begin]).mean()) >= 1 - HABIT_SHARE
            if was_late and float(np.median(lateness[:begin])) > MIN_SHARE / 2 * float(np.median(base[:begin])):
                begin = 0  # it was late before, only less
        else:
            begin = 0
        for since in (begin, 0) if begin else (0,):
            judged = _judge_since(since, own, base, column)
            if judged is not None:
                late.append(judged)
                break
    return sorted(late, key=lambda rank: -rank.excess_ns)


def _judge_since(begin: int, own: Floats, base: Floats, column: int) -> LateRank | None:
    lateness = own[:, column] - base
    own, base, beyond = own[begin:], base[begin:], lateness[begin:]
    late_share = float((beyond > MIN_SHARE * base).mean())
    excess, share = float(beyond.mean()), float(np.median(beyond) / max(float(np.median(base)), 1.0))
    if late_share < HABIT_SHARE or share < MIN_SHARE or excess <= 0:
        return None
    usual = np.median(own, axis=0)
    usual_of_others = np.delete(usual, column)
    deviation = 1.4826 * float(np.median(np.abs(usual_of_others - np.median(usual_of_others))))
    # Its lateness in standard deviations of the others' (robust: 1.4826 times the median deviation): ranks that differ anyway
    if float(usual[column] - np.median(usual_of_others)) <= 3.0 * deviation:
        return None  # it differs as the others do among each other
    steps, ranks = own.shape
    last = own.argmax(axis=1) == column
    # Chance that one of equal ranks takes longest in every step: ranks ^ (1 - steps). Below it, a rank that does is late by habit
    always_last = steps < FEW_STEPS and bool(last.all()) and float(ranks) ** (1 - steps) < 0.01
    if float(np.median(beyond)) <= SURE_LATE * _estimate_error(lateness, begin, own) and not always_last:
        return None
    return LateRank(column, begin, excess, excess / max(float(base.mean()), 1.0), late_share, float(last.mean()))


def _estimate_error(lateness: Floats, begin: int, own: Floats) -> float:
    """Estimate the standard error of the lateness from row `begin` on, in ns; `own`: all ranks from there on.

    Neighbouring steps are alike where a machine is busy for a while: they count as (1 - r) / (1 + r) of as many that are not, with r their
    correlation (Bayley and Hammersley 1946).
    """
    if lateness.size - begin < FEW_STEPS:
        apart = own - np.median(own, axis=1, keepdims=True)
        freedom = max((own.shape[0] - 1) * (own.shape[1] - 1), 1)
        return float(np.sqrt(((apart - apart.mean(axis=0)) ** 2).sum() / freedom / own.shape[0]))
    parts = [part - np.median(part) for part in (lateness[:begin], lateness[begin:]) if part.size]
    left = np.concatenate(parts)
    deviation = 1.4826 * float(np.median(np.abs(left)))
    left = left.clip(-SURE_LATE * deviation, SURE_LATE * deviation)
    alike = float((left[1:] * left[:-1]).sum() / max(float((left * left).sum()), 1e-9))
    return deviation * float(np.sqrt((1 + max(alike, 0.0)) / (1 - min(alike, 0.99)) / (lateness.size - begin)))


def compute_others_median(own: Floats) -> Floats:
    """Return for each step and rank the median over the other ranks (steps x ranks)."""
    count = own.shape[1] - 1
    place = own.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    ordered = np.sort(own, axis=1)
    low, high = (count - 1) // 2, count // 2
    without = [np.where(place <= at, ordered[:, [at + 1]], ordered[:, [at]]) for at in (low, high)]
    return np.asarray((without[0] + without[1]) / 2)


def format_nobody_late(own: Floats, ranks: list[int]) -> str:
    """Format a sentence about ranks of which none is late for long."""
    others = compute_others_median(own)
    late = own - others > MIN_SHARE * others
    if float(late.any(axis=1).mean()) >= HABIT_SHARE:
        last = np.bincount(own.argmax(axis=1), minlength=len(ranks))
        most, share = ranks[int(last.argmax())], format_share(float(last.max()) / own.shape[0])
        return f"no rank is late for long: ranks take turns, rank {most} is last most often, in {share} of {own.shape[0]} steps"
    usual = np.median(own - others, axis=0) / np.maximum(np.median(others, axis=0), 1.0)
    top = int(usual.argmax())
    return (
        f"no rank is late for long: rank {ranks[top]} takes longest for itself, {format_share(float(usual[top]), 1)} more than the median "
        f"of the others in {own.shape[0]} steps"
    )


MIN_PROFILED = 3
"""Fewer profiled steps tell a habit from chance badly."""


class _Source(msgspec.Struct, frozen=True):
    ranks: list[int]
    numbers: list[int] | None
    own: Floats
    least: int
    records: RankSteps | None = None
    """Where the own times are those of the step records."""


def find_straggler(
    summaries: Sequence[RankSummary], matched: pl.DataFrame, rows: Sequence[RankRow]
) -> tuple[Straggler | None, Notice | None]:
    """Find the rank for which the others wait, or None and why there is none.

    Judged by the records of all steps where the ranks have them. They do not show waits within the forward pass (sharded parameters,
    SyncBatchNorm), so where they show no late rank the profiled steps are asked, by their wall time less the waits in matched messages.
    """
    reasons, judged = list[str](), list[str]()
    records = read_rank_steps(summaries)
    recorded = records if isinstance(records, str) else _Source(records.ranks, records.numbers.tolist(), records.own, MIN_STEPS, records)
    for source in (recorded, _read_from_messages(summaries, matched)):
        if isinstance(source, str):
            reasons.append(source)
            continue
        late = find_late_ranks(source.own, source.least)
        if late:
            return _build_straggler(summaries, rows, source, late, records), None
        judged.append(format_nobody_late(source.own, source.ranks))
    if judged:
        return None, make_notice(NoticeCode.NO_STRAGGLER, text=judged[0])
    return None, make_notice(NoticeCode.STRAGGLER_UNKNOWN, text="; ".join(reversed(reasons)))


def _read_from_messages(summaries: Sequence[RankSummary], matched: pl.DataFrame) -> _Source | str:
    waits = matched.select("rank", "step", "exposed_wait_ns").drop_nulls()
    if not waits.height:
        return "no message of the analysed steps could be matched between the ranks"
    wall = (pl.col("end_ns") - pl.col("start_ns")).alias("wall")
    frames = [
        summary.steps.select(pl.lit(summary.rank).alias("rank"), "number", "exposed_communication", wall).with_row_index("step")
        for summary in summaries
    ]
    every = pl.concat(frames).with_columns(pl.col("step", "rank").cast(pl.Int64))
    numbered = not every["number"].null_count() and not every.select("rank", "number").is_duplicated().any()
    steps = every.with_columns(key=pl.col("number" if numbered else "step"))  # equal keys are the same step of all ranks
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


def _build_straggler(
    summaries: Sequence[RankSummary], rows: Sequence[RankRow], source: _Source, late: list[LateRank], records: RankSteps | str
) -> Straggler:
    first, of_records = late[0], source.records
    rank, by_ns, parts, begin = source.ranks[first.column], first.excess_ns, [], 0
    since = source.numbers[first.begin] if source.numbers is not None and first.begin else None
    if of_records is not None:
        parts, begin = compare_parts(of_records, first.column, first.begin), first.begin
        forward = of_records.column("forward_ns")[begin:]
        if not np.isnan(forward).any():
            # records show no backward pass without waits but the shortest, which is the late rank's: where its forward pass is slower than
            # the others', its backward pass counts as slower by the same factor
            usual = np.median(forward, axis=0)
            others = float(np.median(np.delete(usual, first.column)))
            slower = max(0.0, 1 - others / max(float(usual[first.column]), 1.0))
            by_ns += slower * float(np.median(of_records.least_backward[begin:]))
    profiled = [summary.steps["number"].drop_nulls().min() for summary in summaries if summary.rank == rank and summary.steps.height]
    before = since is not None and any(isinstance(number, int) and number < since for number in profiled)
    profile = [] if before else compare_buckets(summaries, rows, rank)
    steps = records if isinstance(records, RankSteps) and rank in records.ranks else None
    cause, reason, differences = find_cause(summaries, steps, (rank, begin, by_ns), profile, parts)
    # The ranks that are late as well: all those of its machine?
    ranks, hosts = [source.ranks[other.column] for other in late], {summary.rank: summary.host for summary in summaries}
    host, shared = hosts.get(rank, ""), ""
    there = {other for other, name in hosts.items() if name == host}
    machine = bool(host) and len(set(hosts.values())) > 1 and len(there) > 1 and set(ranks) == there
    if len(ranks) > 1:
        more = f"Rank {ranks[1]} is" if len(ranks) == 2 else f"{len(ranks) - 1} other ranks are"
        on_it = bool(host) and set(ranks) <= there
        where = f", {'as all ranks of' if machine else 'on'} its machine ({host})" if on_it else ""
        shared = f" {more} late as well{where}."
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
        whole_run=of_records is not None,
    )
