"""Why a rank is late: the largest of what differs from the median rank, in a sentence with its figures."""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag.job.differences import COMMUNICATION, excess, of_writing
from gpudiag.job.slower import Found, device_cause
from gpudiag.model.breakdown import IDLE_BUCKETS
from gpudiag.model.job import Difference
from gpudiag.model.rank import RankSummary
from gpudiag.timeline.rank_steps import RankSteps
from gpudiag.units import format_ns

EXPLAINS = 0.3
"""Part of the lateness that the largest difference has to explain (heuristic)."""

WORTH = 0.05
"""Differences from this part of the lateness on are told."""

WRITES_MB = 1.0
"""What a rank writes to files beyond the median rank, a step, from which on it is told."""

MOST = 8

_GROUPS = {
    "idle_data": "loader", "loader_wait_ns": "loader",
    "exposed_copy": "copies", "h2d_ns": "copies",
    "exposed_communication": "communication",
    "compute": "device", "memory": "device", "overhead": "device", "unknown": "device", "forward_ns": "device", "optimizer_ns": "device",
    **{bucket: "host" for bucket in IDLE_BUCKETS if bucket != "idle_data"}, "rest_ns": "host",
}  # fmt: skip
"""What differs -> what is compared as one."""

_WORDS = {
    "idle_data": "It waits {own} a step for its batches, the median rank {median}.",
    "loader_wait_ns": "It waits {own} a step for its batches, the median rank {median}.",
    "exposed_copy": "Copies hold up its device for {own} a step, that of the median rank for {median}.",
    "h2d_ns": "Its copies to the device take {own} a step, those of the median rank {median}.",
    "exposed_communication": "Its messages take {own} a step without its waits, those of the median rank {median}: a slow link.",
    "idle_launch": "Its device waits {own} a step for the host to launch work, that of the median rank {median}: slow code, or a busy CPU.",
    "idle_sync": "Its device is idle for {own} a step after the host waited for it, that of the median rank for {median}.",
    "idle_allocation": "Allocations hold it up for {own} a step, the median rank for {median}.",
    "idle_compile": "Compilation holds it up for {own} a step, the median rank for {median}.",
    "idle_gc": "Garbage collection holds it up for {own} a step, the median rank for {median}.",
    "idle_io": "It writes or reads files for {own} a step, the median rank for {median}: checkpoints or logs of one rank?",
    "rest_ns": "It spends {own} a step outside loading, forward, backward and optimizer, the median rank {median}: logging, evaluation or "
    "checkpoints of one rank?",
}  # fmt: skip
_OTHERWISE = "Its device is idle for {own} a step for reasons that the trace does not tell, that of the median rank for {median}."


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
        group, members = _largest(told)
        if members and sum(excess(member) for member in members) >= EXPLAINS * by_ns:
            cause, reason, more = _judge(summaries, steps, (rank, begin), group, members, profiled=profiled)
            return cause, reason, _worth([*told, *more], by_ns, more)
    return (
        "not known",
        "No part of its step is longer than on the median rank by as much as it is late.",
        _worth([*profile, *parts], by_ns, []),
    )


def _largest(told: list[Difference]) -> tuple[str, list[Difference]]:
    """Return the group that differs most, and its differences."""
    groups: dict[str, list[Difference]] = {}
    for difference in told:
        if difference.what in _GROUPS:
            groups.setdefault(_GROUPS[difference.what], []).append(difference)
    most = max(groups, key=lambda group: sum(excess(member) for member in groups[group]), default="")
    return most, groups.get(most, [])


def _judge(
    summaries: Sequence[RankSummary],
    steps: RankSteps | None,
    late: tuple[int, int],
    group: str,
    members: list[Difference],
    *,
    profiled: bool,
) -> Found:
    if group == "device":
        busy = Difference(what="busy", own=sum(member.own for member in members), median=sum(member.median for member in members))
        return device_cause(summaries, steps, *late, busy, profiled=profiled)
    top = max(members, key=excess)
    words = _WORDS.get(top.what, _OTHERWISE).format(own=format_ns(top.own), median=format_ns(top.median))
    written = of_writing(steps, *late) if group == "host" else None
    if written is None or excess(written) < WRITES_MB:
        return ("not known" if top.what not in _WORDS else group), words, []
    more = f" It writes {written.own:,.1f} MB a step to files, the median rank {written.median:,.1f} MB."
    return group, f"{words}{more}", [written]


def _worth(told: list[Difference], by_ns: float, named: list[Difference]) -> tuple[Difference, ...]:
    """Return the differences that are worth telling: those in ns by their size, then those in other units that the reason names."""
    times = [found for found in told if found.unit == "ns" and excess(found) >= WORTH * by_ns]
    others = [found for found in named if found.unit != "ns"]
    return (*sorted(times, key=excess, reverse=True)[: MOST - len(others)], *others)
