"""The ranks of a job and their messages as rows of figures, the same in every renderer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gpudiag.facts.spoken import kernel_label
from gpudiag.model.breakdown import BUCKETS
from gpudiag.model.job import Job, MessageRow, RankRow
from gpudiag.model.report import ReportData
from gpudiag.report import words
from gpudiag.report.escape import clean
from gpudiag.report.labels import collective_label
from gpudiag.report.ranks import ranges, read_ranks
from gpudiag.units import format_bytes, format_ns, format_rate, format_share

FEW = 8
"""Ranks that a terminal lists whole; of more only those that stand out."""

MOST_MESSAGES = 6
"""Kinds of messages listed in a terminal: those that take most of a rank's time."""

_WORTH_TELLING = 0.01
"""Share of the median step below which a part that differs is not told."""


class Column(NamedTuple):
    """A column: title, what it means, and the least width of a terminal that shows it."""

    title: str
    help: str
    least: int = 0


RANK_COLUMNS = (
    Column("step", "mean of its analysed steps"),
    Column("own", "the step without what it waits, in messages, for ranks that arrive later"),
    Column("waits", "for others: in messages before the last rank has arrived, other work beside it or not", 50),
    Column("transfer", "in messages after the last rank has arrived", 90),
    Column("exposed", "communication that no other work of the device covers", 80),
    Column("last", "share of its matched messages in which it arrives last", 66),
)
"""Figures of a rank; times are means of a step."""

DIFFERS = Column("differs most in", "the part of the step that differs most from the median rank; waiting for other ranks left out", 96)

MESSAGE_COLUMNS = (
    Column("calls", "of the analysed steps, matched on all ranks of the group", 96),
    Column("skew", "last arrival less first arrival: the median call", 100),
    Column("waits", "mean over calls and ranks: until the last rank has arrived"),
    Column("transfer", "mean over calls: from the last arrival to the end", 44),
    Column("bus", "bus bandwidth: bytes over the transfer, times the factor of the collective (NCCL tests); comparable with the link", 60),
    Column("of link", "bus bandwidth over the one-direction rate of the link", 76),
    Column("last rank", "the rank that arrives last most often, and in which share of the calls", 70),
)
"""Figures of one kind of message; times are of one call."""

_LEGEND = (
    "own: the step without waits, in messages, for ranks that arrive later. waits and transfer: before and after the last one arrives."
)
MESSAGE_LEGEND = "Times are of one call. waits: until the last rank has arrived, mean over the ranks; transfer: from then to the end."


# -- ranks ----------------------------------------------------------------------------------------------------------------------


def rank_rows(job: Job, most: int = FEW) -> list[RankRow]:
    """Return the ranks that were read if they are at most `most`, else those that stand out (see `roles`), by rank."""
    rows = read_ranks(job)
    if len(rows) <= max(most, FEW):
        return rows
    wanted = set(roles(job))
    return [row for row in rows if row.rank in wanted]


def roles(job: Job) -> dict[int, str]:
    """Return what each rank that stands out is: 'late', 'shown', 'longest own' (time), 'shortest own', or several of them.

    Without own times 'slowest' and 'fastest' by the step.
    """
    by, called = (job.wall, ("slowest", "fastest")) if job.own is None else (job.own, ("longest own", "shortest own"))
    parts = [(job.straggler.rank, "late")] if job.straggler else []
    parts += [(job.shown_rank, "shown")]
    parts += [(by.most_rank, called[0]), (by.least_rank, called[1])] if by.most > by.least else []
    made: dict[int, list[str]] = {}
    for rank, role in parts:
        made.setdefault(rank, []).append(role)
    return {rank: ", ".join(told) for rank, told in made.items()}


def rank_name(row: RankRow, known: dict[int, str]) -> str:
    """Return 'rank 7 (late, longest own)'; `known`: `roles` of the job."""
    role = known.get(row.rank)
    return f"rank {row.rank} ({role})" if role else f"rank {row.rank}"


def machines(job: Job) -> dict[int, str]:
    """Return, by rank, its machine and, where the ranks have devices of several kinds, its device; '' for what is not known."""
    several = len({row.device for row in job.ranks if row.device}) > 1
    told = {row.rank: (row.host, row.device if several else "") for row in job.ranks}
    return {rank: clean(", ".join(text for text in texts if text), 120) for rank, texts in told.items()}


def rank_figures(row: RankRow) -> list[str]:
    """Return the cells of RANK_COLUMNS; '?' for what is not known."""
    return [*map(_time, rank_values(row)[:-1]), "?" if row.arrived_last_share is None else words.small_share(row.arrived_last_share)]


def rank_values(row: RankRow) -> list[float | None]:
    """Return the figures of RANK_COLUMNS: times in ns and a share; None for what is not known."""
    return [row.wall_ns, row.own_ns, row.waiting_ns, row.transfer_ns, row.exposed_communication_ns, row.arrived_last_share]


def known_columns(figures: Sequence[Sequence[str]]) -> list[int]:
    """Return the places of the columns of which a figure is known on some row: a column of question marks helps nobody."""
    return [place for place in range(len(figures[0]) if figures else 0) if any(row[place] != "?" for row in figures)]


def legend(job: Job) -> str:
    """Return what the titles of RANK_COLUMNS mean, '' where no rank has one of those figures."""
    return _LEGEND if any(row.own_ns is not None and row.waiting_ns is not None for row in job.ranks) else ""


def _time(ns: float | None) -> str:
    return "?" if ns is None else format_ns(ns)


def differences(report: ReportData) -> dict[int, str]:
    """Return, by rank, the part of the step that differs most from the median over the ranks: 'waiting for data +12.3 ms'.

    Waiting for other ranks is left out: what is late elsewhere shows there. Ranks that differ by less than 1 % of a step have none.
    """
    job = report.job
    if job is None:
        return {}
    rows = {row.rank: parts for row in read_ranks(job) if (parts := without_waits(row)) is not None}
    if len(rows) < 2:
        return {}
    medians = {bucket: statistics.median(parts[bucket] for parts in rows.values()) for bucket in BUCKETS}
    least = _WORTH_TELLING * job.wall.median
    made = {rank: max(BUCKETS, key=lambda name: abs(parts[name] - medians[name])) for rank, parts in rows.items()}
    changes = {rank: rows[rank][bucket] - medians[bucket] for rank, bucket in made.items()}
    return {rank: _change(bucket, changes[rank], report) for rank, bucket in made.items() if abs(changes[rank]) >= least}


def _change(bucket: str, ns: float, report: ReportData) -> str:
    return f"{words.bucket_label(bucket, report).removeprefix('idle: ')} {'+' if ns > 0 else '-'}{format_ns(abs(ns))}"


def without_waits(row: RankRow) -> dict[str, int] | None:
    """Return the parts of a rank's mean step in ns, exposed communication without waiting for others; None where they are not known."""
    if row.buckets_ns is None:
        return None
    parts: dict[str, int] = msgspec.structs.asdict(row.buckets_ns)
    return parts | {"exposed_communication": parts["exposed_communication"] - exposed_wait_ns(row)}


def exposed_wait_ns(row: RankRow) -> int:
    """Return the time of a step that nothing covers in which the rank waits for others, as far as it counts as communication; 0: none."""
    if row.buckets_ns is None or row.exposed_waiting_ns is None:
        return 0
    return min(row.exposed_waiting_ns, row.buckets_ns.exposed_communication)


# -- messages -------------------------------------------------------------------------------------------------------------------


def message_rows(job: Job) -> list[MessageRow]:
    """Return the kinds of messages, those first that take most of a rank's time."""
    return sorted(job.messages, key=lambda row: (-message_ns(row), row.kind, row.bytes or 0))


def message_ns(row: MessageRow) -> int:
    """Return the time in ns that the calls take on an average rank, in all analysed steps."""
    return (row.waiting_ns + row.transfer_ns) * row.count


def message_name(row: MessageRow) -> str:
    """Return 'all_reduce, 25.6 MB, 8 ranks'."""
    size = "" if row.bytes is None else format_bytes(row.bytes)
    ranks = f"{len(row.members)} {words.plural(len(row.members), 'rank')}" if row.members else ""
    return clean(", ".join(text for text in (row.kind or collective_label(row.name), size, ranks) if text), 120)


def kernel_name(row: MessageRow) -> str:
    """Return the kernel of a message without its arguments, '' where that is no more than its kind."""
    name = clean(kernel_label(row.name.partition("(")[0]), 100)
    return "" if name == row.kind else name


def group_text(row: MessageRow) -> str:
    """Return the group and its ranks, 'fsdp: ranks 0-7'; '' where neither is known."""
    name = "" if row.group == ",".join(map(str, row.members)) else row.group  # some writers name a group by its ranks
    return clean(": ".join(text for text in (name, f"ranks {ranges(row.members)}" if row.members else "") if text), 160)


def message_figures(row: MessageRow) -> list[str]:
    """Return the cells of MESSAGE_COLUMNS; '?' for what is not known."""
    rate = "?" if row.busbw_byte_per_s is None else format_rate(row.busbw_byte_per_s, "B")
    link = "?" if row.link_share is None else format_share(row.link_share)
    return [f"{row.count:,}", *map(format_ns, (row.skew_ns, row.waiting_ns, row.transfer_ns)), rate, link, last_rank(row)]


def last_rank(row: MessageRow) -> str:
    """Return 'rank 7, 87 %'; '?' where it is not known."""
    if row.last_rank is None:
        return "?"
    return f"rank {row.last_rank}" + ("" if row.last_share is None else f", {format_share(row.last_share)}")


def unmatched_line(rows: Sequence[MessageRow]) -> str:
    """Return how many calls of single ranks have no partner, '' where all have one."""
    count = sum(row.unmatched for row in rows)
    if not count:
        return ""
    return f"{count:,} {words.plural(count, 'call')} of single ranks have no partner on every other rank of the group: not in this table."
