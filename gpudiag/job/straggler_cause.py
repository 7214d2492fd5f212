"""Why a rank is late: what differs from the median rank by bucket, part of the step, operator, work and pace of its device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import numpy as np
import polars as pl

from gpudiag.model.analysis import RankSummary
from gpudiag.model.job import Difference, RankRow
from gpudiag.model.timeline import BUCKETS, IDLE_BUCKETS
from gpudiag.timeline.history import STEP_PARTS, RankSteps
from gpudiag.units import format_count, format_flop, format_ns

COMMUNICATION = "exposed_communication"


def compare_with_others(what: str, values: Mapping[int, float], rank: int, unit: str = "ns") -> Difference | None:
    """Compare the difference of `rank` from the median of the others in `values` (rank -> figure); None where either is not known."""
    others = [value for other, value in values.items() if other != rank]
    if rank not in values or not others:
        return None
    return Difference(what=what, own=float(values[rank]), median=float(median(others)), unit=unit)


def measure_excess(difference: Difference) -> float:
    """Measure how much more the rank has than the median rank, in the unit of the difference."""
    return difference.own - difference.median


def compare_buckets(summaries: Sequence[RankSummary], rows: Sequence[RankRow], rank: int) -> list[Difference]:
    """Compare the differences by bucket of the mean step, in ns.

    Exposed communication without the waits for other ranks: those are what a late rank makes the others do.
    """
    means = {summary.rank: summary.steps.select(pl.col(BUCKETS).mean()).row(0, named=True) for summary in summaries if summary.steps.height}
    waits = {row.rank: row.exposed_waiting_ns for row in rows}
    found = []
    for bucket in BUCKETS:
        values = {other: float(mean[bucket] or 0.0) for other, mean in means.items()}
        if bucket == COMMUNICATION:
            values = {other: max(0.0, value - wait) for other, value in values.items() if (wait := waits.get(other)) is not None}
        found.append(compare_with_others(bucket, values, rank))
    return [difference for difference in found if difference is not None]


def compare_parts(steps: RankSteps, column: int, begin: int) -> list[Difference]:
    """Compare the differences by part of the step, in ns: medians over the unprofiled steps from row `begin` on.

    Backward passes cannot be compared: they hold the waits for the late rank. rest_ns: what lies outside the parts that were seen.
    """
    parts = {column_name: steps.part(name) for name, column_name in STEP_PARTS.items()} | {"rest_ns": np.clip(steps.rest, 0, None)}
    medians = {name: np.median(values[begin:], axis=0).tolist() for name, values in parts.items()}
    found = (
        compare_with_others(name, dict(zip(steps.ranks, values, strict=True)), steps.ranks[column]) for name, values in medians.items()
    )
    return [difference for difference in found if difference is not None]


def compare_work(summaries: Sequence[RankSummary], steps: RankSteps | None, rank: int, begin: int) -> list[Difference]:
    """Compare the work of a step: positions or samples of the batches, matrix FLOP, calls of operators; what is known."""
    found: list[Difference | None] = []
    if steps is not None:
        for name, unit in (("batch_elements", "positions"), ("samples", "samples")):
            values = steps.column(name)[begin:]
            if not np.isnan(values).any():
                found.append(compare_with_others("batch", dict(zip(steps.ranks, values.mean(axis=0).tolist(), strict=True)), rank, unit))
                break
    flops = {
        summary.rank: float(summary.steps["matrix_flops"].sum()) / summary.steps.height
        for summary in summaries
        if summary.steps.height and not summary.steps["matrix_flops"].null_count()
    }
    calls = {summary.rank: float(summary.ops["count"].sum()) / summary.steps.height for summary in summaries if summary.steps.height}
    found.append(compare_with_others("matrix_flops", {other: value for other, value in flops.items() if value}, rank, "FLOP"))
    found.append(compare_with_others("calls", {other: value for other, value in calls.items() if value}, rank, "calls"))
    return [difference for difference in found if difference is not None]


def compare_ops(summaries: Iterable[RankSummary], rank: int) -> list[Difference]:
    """Compare the differences by operator and pass in ns of a mean step, those that take the median rank longest first."""
    frames = [
        summary.ops.group_by("name").agg(pl.col("kernel_ns").sum() / summary.steps.height).with_columns(rank=pl.lit(summary.rank))
        for summary in summaries
        if summary.steps.height and summary.ops.height
    ]
    if not frames:
        return []
    every = pl.concat(frames)
    own = every.filter(pl.col("rank") == rank).select("name", own="kernel_ns")
    others = every.filter(pl.col("rank") != rank).group_by("name").agg(pl.col("kernel_ns").median().alias("median"))
    joined = own.join(others, on="name").sort("median", "name", descending=[True, False])
    return [Difference(what=f"op {name}", own=own_ns, median=usual) for name, own_ns, usual in joined.iter_rows()]


PACE_EXPLAINS = 0.5
"""Part of the longer time that a cause has to explain."""

FoundCause = tuple[str, str, list[Difference]]
"""Cause, reason and the differences that the reason rests on."""


def find_device_cause(
    summaries: Sequence[RankSummary], steps: RankSteps | None, rank: int, begin: int, busy: Difference, *, profiled: bool
) -> FoundCause:
    """Find why the device of `rank` is busy for `busy` ns of a step; `profiled`: whether the profiled steps show it."""
    slower = busy.own / max(busy.median, 1.0) - 1
    took = f"device works {format_ns(busy.own)} a step, that of the median rank {format_ns(busy.median)}"
    work = [known for known in compare_work(summaries, steps, rank, begin) if profiled or known.what == "batch"]
    more = [known for known in work if known.median > 0 and known.own / known.median - 1 >= PACE_EXPLAINS * slower]
    if not more:
        ops = compare_ops(summaries, rank) if profiled else []
        known_work = any(known.what != "calls" and known.unit != "samples" for known in work)
        return _explain_pace(summaries, rank, f"Its {took}", slower, ops, known_work=known_work)
    own, usual = more[0].own, more[0].median
    if more[0].what == "batch":
        words = f"Its batches hold {format_count(own)} {more[0].unit}, those of the median rank {format_count(usual)}"
    elif more[0].unit == "FLOP":
        words = f"It computes {format_flop(own)} of matrix products a step, the median rank {format_flop(usual)}"
    else:
        words = f"It calls {format_count(own)} operators a step, the median rank {format_count(usual)}"
    return "more work", f"{words}: its {took}.", more


def _explain_pace(
    summaries: Sequence[RankSummary], rank: int, took: str, slower: float, ops: list[Difference], *, known_work: bool
) -> FoundCause:
    # What was sampled beside the steps and speaks of a slower device, and the words on it
    signs, words = [], []
    clocks = {summary.rank: summary.sm_clock_mhz for summary in summaries if summary.sm_clock_mhz is not None}
    clock = compare_with_others("sm_clock_mhz", clocks, rank, "MHz")
    # A clock this much below that of the median rank is lower (clocks of like devices differ by a step of 15 MHz)
    if clock is not None and clock.own < 0.97 * clock.median:
        signs.append(clock)
        words.append(f"SM clock {clock.own:,.0f} MHz, median rank {clock.median:,.0f} MHz")
    throttled = {reason for summary in summaries if summary.rank == rank for reason in summary.throttled}
    others = [set(summary.throttled) for summary in summaries if summary.rank != rank]
    unusual = sorted(reason for reason in throttled if sum(reason in held for held in others) * 2 < len(others))  # less than half have it
    if unusual:
        words.append(f"clocks held down by {', '.join(unusual)}")
    heat = {summary.rank: summary.temperature_c for summary in summaries if summary.temperature_c is not None}
    hot = compare_with_others("temperature_c", heat, rank, "C")
    # A difference in temperature that is worth telling
    if words and hot is not None and measure_excess(hot) > 5.0:  # heat alone slows nothing
        signs.append(hot)
        words.append(f"{hot.own:.0f} C, median rank {hot.median:.0f} C")
    why = f" ({'; '.join(words)})" if words else ""
    total = sum(op.median for op in ops)
    alike_ns = sum(op.median for op in ops if op.own / max(op.median, 1.0) - 1 >= PACE_EXPLAINS * slower)
    # Share of the operators' time that is slower by about the same factor where the device is the cause
    even = alike_ns / total >= 0.7 if total else None
    if even is False and not why:
        top = max(ops, key=measure_excess)
        name = top.what.removeprefix("op ")
        longer = f"mostly {name}, {format_ns(top.own)} instead of {format_ns(top.median)}"
        return "not known", f"{took}: {longer}; other operators take as long as there.", [top]
    if not known_work and not why:
        unknown = "a slower device or more work, neither batches nor matrix FLOP of the ranks are known"
        return "not known", f"{took}: {unknown}.", ops[:1]
    alike = "the same work, every operator slower by about as much" if even else "the same work" if known_work else "a slower device"
    own = next(summary for summary in summaries if summary.rank == rank)
    cause, where = "slower device", ""
    if own.device_kind != "gpu":  # the cores of a CPU are shared with whatever runs there
        where = "; its cores are slower, or shared with other programs"
        if own.host and sum(summary.host == own.host for summary in summaries) > 1:
            cause = "other work on its machine"
            where = "; other ranks of its machine are faster: its cores are shared, or fewer threads run"
    return cause, f"{took}: {alike}{where}{why}.", [*signs, *ops[:1]]


_GROUPS = {
    "idle_data": "loader", "loader_wait_ns": "loader",
    "exposed_copy": "copies", "h2d_ns": "copies",
    "exposed_communication": "communication",
    "compute": "device", "memory": "device", "overhead": "device", "unknown": "device", "forward_ns": "device", "optimizer_ns": "device",
    "outside_recording": "device",
    **{bucket: "host" for bucket in IDLE_BUCKETS if bucket != "idle_data"}, "rest_ns": "host",
}  # fmt: skip
"""What differs -> what is compared as one."""

_SENTENCES = {
    "idle_data": "It waits {own} a step for its batches, the median rank {median}.",
    "loader_wait_ns": "It waits {own} a step for its batches, the median rank {median}.",
    "exposed_copy": "Copies hold up its device for {own} a step, that of the median rank for {median}.",
    "h2d_ns": "Its copies to the device take {own} a step, those of the median rank {median}.",
    "exposed_communication": "Its messages take {own} a step without its waits, those of the median rank {median}: a slow link.",
    "idle_launch": "Its device waits {own} a step for the host to launch work, that of the median rank {median}: slow code, or a busy CPU.",
    "idle_sync": "Its device is idle for {own} a step after the host waited for it, that of the median rank for {median}.",
    "idle_allocation": "Allocations hold it up for {own} a step, the median rank for {median}.",
    "idle_compile": "Compilation holds it up for {own} a step, the median rank for {median}.",
    "idle_init": "Its device is set up for {own} a step, that of the median rank for {median}: the first use of a device.",
    "idle_gc": "Garbage collection holds it up for {own} a step, the median rank for {median}.",
    "idle_io": "It writes or reads files for {own} a step, the median rank for {median}: checkpoints or logs of one rank?",
    "rest_ns": "It spends {own} a step outside loading, forward, backward and optimizer, the median rank {median}: logging, evaluation or "
    "checkpoints of one rank?",
}  # fmt: skip
_UNKNOWN_SENTENCE = "Its device is idle for {own} a step for reasons that the trace does not tell, that of the median rank for {median}."


def find_cause(
    summaries: Sequence[RankSummary],
    steps: RankSteps | None,
    late: tuple[int, int, float],
    profile: list[Difference],
    parts: list[Difference],
) -> tuple[str, str, tuple[Difference, ...]]:
    """Return cause, reason and differences of a late rank. `late`: rank, row of `steps` from which on, and by how many ns a step.

    `profile`: its differences by bucket in the profiled steps; `parts`: by part of the unprofiled ones. The profile tells more; where it
    does not show the lateness (it was recorded before, or the pauses fall elsewhere) the parts are judged. Messages last: all ranks of one
    take part until it ends, and which of them had other work meanwhile says little of the link.
    """
    rank, begin, by_ns = late
    besides = [difference for difference in profile if difference.what != COMMUNICATION]
    for told in (besides, parts, profile):
        profiled = told is not parts
        groups: dict[str, list[Difference]] = {}
        for difference in told:
            if difference.what in _GROUPS:
                groups.setdefault(_GROUPS[difference.what], []).append(difference)
        group = max(groups, key=lambda name: sum(map(measure_excess, groups[name])), default="")
        members = groups.get(group, [])
        # Part of the lateness that the largest difference has to explain (heuristic)
        if members and sum(measure_excess(member) for member in members) >= 0.3 * by_ns:
            cause, reason, more = _judge_group(summaries, steps, (rank, begin), group, members, profiled=profiled)
            return cause, reason, _keep_worthwhile([*told, *more], by_ns, more)
    return (
        "not known",
        "No part of its step is longer than on the median rank by as much as it is late.",
        _keep_worthwhile([*profile, *parts], by_ns, []),
    )


def _judge_group(
    summaries: Sequence[RankSummary], steps: RankSteps | None, late: tuple[int, int], group: str, members: list[Difference], *,
    profiled: bool,
) -> FoundCause:  # fmt: skip
    rank, begin = late
    if group == "device":
        busy = Difference(what="busy", own=sum(member.own for member in members), median=sum(member.median for member in members))
        return find_device_cause(summaries, steps, rank, begin, busy, profiled=profiled)
    top = max(members, key=measure_excess)
    words = _SENTENCES.get(top.what, _UNKNOWN_SENTENCE).format(own=format_ns(top.own), median=format_ns(top.median))
    written = None
    if group == "host" and steps is not None:  # what the processes write to files
        megabytes = steps.column("written_bytes")[begin:].mean(axis=0) / 1e6
        if not np.isnan(megabytes).any():
            written = compare_with_others("written", dict(zip(steps.ranks, megabytes.tolist(), strict=True)), rank, "MB")
    # What a rank writes to files beyond the median rank, a step, from which on it is told
    if written is None or measure_excess(written) < 1.0:
        return ("not known" if top.what not in _SENTENCES else group), words, []
    more = f" It writes {written.own:,.1f} MB a step to files, the median rank {written.median:,.1f} MB."
    return group, f"{words}{more}", [written]


def _keep_worthwhile(told: list[Difference], by_ns: float, named: list[Difference]) -> tuple[Difference, ...]:
    """Return the differences that are worth telling: those in ns by their size, then those in other units that the reason names."""
    # Differences from this part of the lateness on are told
    times = [found for found in told if found.unit == "ns" and measure_excess(found) >= 0.05 * by_ns]
    others = [found for found in named if found.unit != "ns"]
    return (*sorted(times, key=measure_excess, reverse=True)[: 8 - len(others)], *others)
