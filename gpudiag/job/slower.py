"""Why the device of one rank works longer than the others': more work, or the same work at a slower pace."""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag.job.differences import excess, of_ops, of_telemetry, of_work
from gpudiag.model.job import Difference
from gpudiag.model.rank import RankSummary
from gpudiag.timeline.rank_steps import RankSteps
from gpudiag.units import format_count, format_flop, format_ns

EXPLAINS = 0.5
"""Part of the longer time that a cause has to explain."""

EVEN = 0.7
"""Share of the operators' time that is slower by about the same factor where the device is the cause."""

COOLER = 0.03
"""A clock this much below that of the median rank is lower (clocks of like devices differ by a step of 15 MHz)."""

HOTTER_C = 5.0
"""A difference in temperature that is worth telling."""

Found = tuple[str, str, list[Difference]]
"""Cause, reason and the differences that the reason rests on."""


def device_cause(
    summaries: Sequence[RankSummary], steps: RankSteps | None, rank: int, begin: int, busy: Difference, *, profiled: bool
) -> Found:
    """Return why the device of `rank` is busy for `busy` ns of a step; `profiled`: whether the profiled steps show it."""
    slower = busy.own / max(busy.median, 1.0) - 1
    took = f"its device works {format_ns(busy.own)} a step, that of the median rank {format_ns(busy.median)}"
    work = [known for known in of_work(summaries, steps, rank, begin) if profiled or known.what == "batch"]
    more = [known for known in work if known.median > 0 and known.own / known.median - 1 >= EXPLAINS * slower]
    if more:
        return "more work", f"{_work(more[0])}: {took}.", more
    ops = of_ops(summaries, rank) if profiled else []
    known_work = any(known.what != "calls" and known.unit != "samples" for known in work)
    return _pace(summaries, rank, took, slower, ops, known_work=known_work)


def _work(more: Difference) -> str:
    if more.what == "batch":
        return f"Its batches hold {format_count(more.own)} {more.unit}, those of the median rank {format_count(more.median)}"
    if more.unit == "FLOP":
        return f"It computes {format_flop(more.own)} of matrix products a step, the median rank {format_flop(more.median)}"
    return f"It calls {format_count(more.own)} operators a step, the median rank {format_count(more.median)}"


def _pace(summaries: Sequence[RankSummary], rank: int, took: str, slower: float, ops: list[Difference], *, known_work: bool) -> Found:
    """Return why equal work takes longer."""
    signs, why = _signs(summaries, rank)
    even = _even(ops, slower)
    if even is False and not why:
        top = max(ops, key=excess)
        name = top.what.removeprefix("op ")
        longer = f"mostly {name}, {format_ns(top.own)} instead of {format_ns(top.median)}"
        return "not known", f"{_capital(took)}: {longer}; other operators take as long as there.", [top]
    if not known_work and not why:
        unknown = "a slower device or more work, neither batches nor matrix FLOP of the ranks are known"
        return "not known", f"{_capital(took)}: {unknown}.", ops[:1]
    alike = "the same work, every operator slower by about as much" if even else "the same work" if known_work else "a slower device"
    cause, where = _whose(summaries, rank)
    return cause, f"{_capital(took)}: {alike}{where}{why}.", [*signs, *ops[:1]]


def _even(ops: list[Difference], slower: float) -> bool | None:
    """Return whether most of the operators' time is slower by about as much as all of it; None where no operator is known."""
    total = sum(op.median for op in ops)
    if not total:
        return None
    alike = sum(op.median for op in ops if op.own / max(op.median, 1.0) - 1 >= EXPLAINS * slower)
    return alike / total >= EVEN


def _whose(summaries: Sequence[RankSummary], rank: int) -> tuple[str, str]:
    """Return the cause of a slower pace, and what to add: the cores of a CPU are shared with whatever runs there."""
    own = next(summary for summary in summaries if summary.rank == rank)
    if own.device_kind == "gpu":
        return "slower device", ""
    same = own.host and sum(summary.host == own.host for summary in summaries) > 1
    if same:
        return "other work on its machine", "; other ranks of its machine are faster: its cores are shared, or fewer threads run"
    return "slower device", "; its cores are slower, or shared with other programs"


def _signs(summaries: Sequence[RankSummary], rank: int) -> tuple[list[Difference], str]:
    """Return what telemetry shows of a slower device, and its words ('' for none)."""
    found, words = [], []
    for sampled in of_telemetry(summaries, rank):
        if sampled.what == "sm_clock_mhz" and sampled.own < (1 - COOLER) * sampled.median:
            found.append(sampled)
            words.append(f"SM clock {sampled.own:,.0f} MHz, median rank {sampled.median:,.0f} MHz")
    own, others = _throttled(summaries, rank)
    if own - others:
        words.append(f"clocks held down by {', '.join(sorted(own - others))}")
    if words:  # heat alone slows nothing
        hot = [sampled for sampled in of_telemetry(summaries, rank) if sampled.what == "temperature_c" and excess(sampled) > HOTTER_C]
        found += hot
        words += [f"{sampled.own:.0f} C, median rank {sampled.median:.0f} C" for sampled in hot]
    return found, f" ({'; '.join(words)})" if words else ""


def _throttled(summaries: Sequence[RankSummary], rank: int) -> tuple[set[str], set[str]]:
    """Return the reasons that hold down the clocks of `rank`, and those of at least half of the others."""
    own = {reason for summary in summaries if summary.rank == rank for reason in summary.throttled}
    others = [set(summary.throttled) for summary in summaries if summary.rank != rank]
    return own, {reason for reason in own if sum(reason in held for held in others) * 2 >= len(others)}


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
