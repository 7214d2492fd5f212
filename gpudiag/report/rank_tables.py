"""Ranks and their messages as rows of figures, and printed for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gpudiag.facts.event_labels import format_kernel_name
from gpudiag.model.job import Job, MessageRow, RankRow
from gpudiag.model.report import ReportData
from gpudiag.model.timeline import BUCKETS
from gpudiag.report import labels, ranks
from gpudiag.report.console import (
    QUIET,
    clean,
    create_table,
    fit_columns,
    format_cells,
    print_heading,
    print_line,
    print_table_with_details,
    shorten_middle,
)
from gpudiag.report.labels import name_collective
from gpudiag.report.ranks import format_ranges, select_read_ranks
from gpudiag.units import format_bytes, format_ns, format_rate, format_share

if TYPE_CHECKING:
    from rich.console import Console

FEW_RANKS = 8
"""Ranks that a terminal lists whole; of more only those that stand out."""

MOST_MESSAGES = 6
"""Kinds of messages listed in a terminal: those that take most of a rank's time."""

WAITS = "waiting"
"""The part of exposed communication before the last rank has arrived."""

_WORTH_TELLING = 0.01
"""Share of the median step below which a part that differs is not told."""


class RankColumn(NamedTuple):
    """A column: title, what it means, and the least width of a terminal that shows it."""

    title: str
    help: str
    least: int = 0


RANK_COLUMNS = (
    RankColumn("step", "mean of its analysed steps"),
    RankColumn("own", "the step without wait time for ranks that arrive later"),
    RankColumn("wait", "for other ranks: in messages, before the last rank arrives, overlapped or not", 50),
    RankColumn("transfer", "in messages, after the last rank arrives", 90),
    RankColumn("exposed", "exposed communication: not hidden behind other work of the device", 80),
    RankColumn("last", "share of its matched messages in which it arrives last", 66),
)
"""Figures of a rank; times are means of a step."""

DIFFERS = RankColumn("differs most in", "the part of the step that differs most from the median rank; waiting for other ranks left out", 96)

MESSAGE_COLUMNS = (
    RankColumn("calls", "of the analysed steps, matched on all ranks of the group", 96),
    RankColumn("skew", "arrival skew: last arrival less first arrival, the median call", 100),
    RankColumn("wait", "mean over calls and ranks: until the last rank arrives"),
    RankColumn("transfer", "mean over calls: from the last arrival to the end", 44),
    RankColumn(
        "bus", "bus bandwidth: bytes over the transfer, times the factor of the collective (NCCL tests); comparable with the link", 60
    ),
    RankColumn("of link", "bus bandwidth over the one-direction rate of the link", 76),
    RankColumn("last rank", "the rank that arrives last most often, and in which share of the calls", 70),
)
"""Figures of one kind of message; times are of one call."""

_RANK_LEGEND = (
    "own: the step without wait time for ranks that arrive later. wait and transfer: in messages, before and after the last rank arrives."
)
MESSAGE_LEGEND = "Times are of one call. wait: until the last rank arrives, mean over the ranks; transfer: from then to the end."


def select_rank_rows(job: Job, most: int = FEW_RANKS) -> list[RankRow]:
    """Return the ranks that were read if they are at most `most`, else those that stand out (see `roles`), by rank."""
    rows = select_read_ranks(job)
    if len(rows) <= max(most, FEW_RANKS):
        return rows
    wanted = set(find_rank_roles(job))
    return [row for row in rows if row.rank in wanted]


def find_rank_roles(job: Job) -> dict[int, str]:
    """Return what each rank that stands out is: 'straggler', 'shown', 'longest own' (time), 'shortest own', or several of them.

    Without own times 'slowest' and 'fastest' by the step.
    """
    by, called = (job.wall, ("slowest", "fastest")) if job.own is None else (job.own, ("longest own", "shortest own"))
    parts = [(job.straggler.rank, "straggler")] if job.straggler else []
    parts += [(job.shown_rank, "shown")]
    parts += [(by.most_rank, called[0]), (by.least_rank, called[1])] if by.most > by.least else []
    made: dict[int, list[str]] = {}
    for rank, role in parts:
        made.setdefault(rank, []).append(role)
    return {rank: ", ".join(told) for rank, told in made.items()}


def name_rank(row: RankRow, known: dict[int, str]) -> str:
    """Return 'rank 7 (straggler, longest own)'; `known`: `roles` of the job."""
    role = known.get(row.rank)
    return f"rank {row.rank} ({role})" if role else f"rank {row.rank}"


def name_machines(job: Job) -> dict[int, str]:
    """Return, by rank, its machine and, where the ranks have devices of several kinds, its device; '' for what is not known."""
    several = len({row.device for row in job.ranks if row.device}) > 1
    told = {row.rank: (row.host, row.device if several else "") for row in job.ranks}
    return {rank: clean(", ".join(text for text in texts if text), 120) for rank, texts in told.items()}


def format_rank_figures(row: RankRow) -> list[str]:
    """Return the cells of RANK_COLUMNS; '?' for what is not known."""
    *times, last = list_rank_values(row)
    return [*("?" if ns is None else format_ns(ns) for ns in times), "?" if last is None else labels.format_small_share(last)]


def list_rank_values(row: RankRow) -> list[float | None]:
    """Return the figures of RANK_COLUMNS: times in ns and a share; None for what is not known."""
    return [row.wall_ns, row.own_ns, row.waiting_ns, row.transfer_ns, row.exposed_communication_ns, row.arrived_last_share]


def find_known_columns(figures: Sequence[Sequence[str]]) -> list[int]:
    """Return the places of the columns of which a figure is known on some row: a column of question marks helps nobody."""
    return [place for place in range(len(figures[0]) if figures else 0) if any(row[place] != "?" for row in figures)]


def format_rank_legend(job: Job) -> str:
    """Return what the titles of RANK_COLUMNS mean, '' where no rank has one of those figures."""
    return _RANK_LEGEND if any(row.own_ns is not None and row.waiting_ns is not None for row in job.ranks) else ""


def find_largest_differences(report: ReportData) -> dict[int, str]:
    """Return, by rank, the part of the step that differs most from the median over the ranks: 'data loading +12.3 ms'.

    Waiting for other ranks is left out: what is late elsewhere shows there. Ranks that differ by less than 1 % of a step have none.
    """
    job = report.job
    if job is None:
        return {}
    rows = {row.rank: parts for row in select_read_ranks(job) if (parts := split_waits(row)) is not None}
    if len(rows) < 2:
        return {}
    medians = {bucket: statistics.median(parts[bucket] for parts in rows.values()) for bucket in BUCKETS}
    differences = {}
    for rank, parts in rows.items():
        changes = {name: parts[name] - medians[name] for name in BUCKETS}
        bucket, change = max(changes.items(), key=lambda item: abs(item[1]))
        if abs(change) >= _WORTH_TELLING * job.wall.median:
            name = labels.name_bucket(bucket, report).removeprefix("idle: ").partition(" (")[0]  # the column is narrow
            differences[rank] = f"{name} {'+' if change > 0 else '-'}{format_ns(abs(change))}"
    return differences


def split_waits(row: RankRow) -> dict[str, int] | None:
    """Return the parts of a rank's mean step in ns, exposed communication without WAITS, which is a part of its own; None: not known."""
    if row.buckets_ns is None:
        return None
    parts: dict[str, int] = msgspec.structs.asdict(row.buckets_ns)
    communication = parts["exposed_communication"]
    waits = 0 if row.exposed_waiting_ns is None else min(row.exposed_waiting_ns, communication)
    return {**parts, "exposed_communication": communication - waits, WAITS: waits}


def select_message_rows(job: Job) -> list[MessageRow]:
    """Return the kinds of messages, those first that take most of an average rank's time in all analysed steps."""
    return sorted(job.messages, key=lambda row: (-(row.waiting_ns + row.transfer_ns) * row.count, row.kind, row.bytes or 0))


def name_message(row: MessageRow) -> str:
    """Return 'all_reduce, 25.6 MB, 8 ranks'."""
    size = "" if row.bytes is None else format_bytes(row.bytes)
    ranks = f"{len(row.members)} {labels.pluralize(len(row.members), 'rank')}" if row.members else ""
    return clean(", ".join(text for text in (row.kind or name_collective(row.name), size, ranks) if text), 120)


def name_message_kernel(row: MessageRow) -> str:
    """Return the kernel of a message without its arguments, '' where that is no more than its kind."""
    name = clean(format_kernel_name(row.name.partition("(")[0]), 100)
    return "" if name == row.kind else name


def format_group(row: MessageRow) -> str:
    """Return the group and its ranks, 'fsdp: ranks 0-7'; '' where neither is known."""
    name = "" if row.group == ",".join(map(str, row.members)) else row.group  # some writers name a group by its ranks
    return clean(": ".join(text for text in (name, f"ranks {format_ranges(row.members)}" if row.members else "") if text), 160)


def format_message_figures(row: MessageRow) -> list[str]:
    """Return the cells of MESSAGE_COLUMNS, the last such as 'rank 7, 87 %'; '?' for what is not known."""
    rate = "?" if row.busbw_byte_per_s is None else format_rate(row.busbw_byte_per_s, "B")
    link = "?" if row.link_share is None else format_share(row.link_share)
    last = (
        "?" if row.last_rank is None else f"rank {row.last_rank}" + ("" if row.last_share is None else f", {format_share(row.last_share)}")
    )
    return [f"{row.count:,}", *map(format_ns, (row.skew_ns, row.waiting_ns, row.transfer_ns)), rate, link, last]


def format_unmatched(rows: Sequence[MessageRow]) -> str:
    """Return how many calls of single ranks have no partner, '' where all have one."""
    count = sum(row.unmatched for row in rows)
    if not count:
        return ""
    return f"{count:,} {labels.pluralize(count, 'call')} of single ranks were not matched on every rank of the group: not in this table."


def print_ranks(console: Console, report: ReportData, top: int) -> None:
    """Print how the ranks compare, `top` of them where there are no more; nothing where one rank was analysed alone."""
    job = report.job
    if job is None:
        return
    print_heading(console, ranks.RANKS_TITLE)
    for said in ranks.list_missing_ranks(job):
        print_line(console, said, "yellow")
    rows = select_rank_rows(job, top)
    known, differs = find_rank_roles(job), find_largest_differences(report)
    beside = console.width >= DIFFERS.least and any(row.rank in differs for row in rows)
    told = [clean(differs.get(row.rank, "")) for row in rows]
    below = [text if row.rank in known else "" for row, text in zip(rows, told, strict=True)]  # a line each: only where a rank stands out
    _print_fitting_table(
        console, "rank", [name_rank(row, known) for row in rows], RANK_COLUMNS, [format_rank_figures(row) for row in rows],
        beside=(DIFFERS.title, told) if beside else None, below=None if beside else below,
    )  # fmt: skip
    rest = len(ranks.select_read_ranks(job)) - len(rows)
    more = f"{rest:,} more {labels.pluralize(rest, 'rank')} between them: --top {rest + len(rows)} lists all. " if rest else ""
    if said := f"{more}{format_rank_legend(job)}".strip():
        print_line(console, said, QUIET)
    lines = [text for text in (ranks.format_straggler(report), *ranks.list_parallelism_lines(report)) if text]
    if lines:
        console.print()
    for said in lines:
        print_line(console, said)
    if messages := select_message_rows(job):
        shown = messages[:MOST_MESSAGES]
        print_heading(console, "Messages between ranks")
        _print_fitting_table(
            console, "message", [name_message(row) for row in shown], MESSAGE_COLUMNS, [format_message_figures(row) for row in shown]
        )
        less = len(messages) - len(shown)
        more = f"{less:,} more {'kind takes' if less == 1 else 'kinds take'} less time. " if less else ""
        print_line(console, f"{more}{MESSAGE_LEGEND} {format_unmatched(messages)}".strip(), QUIET)
    print_line(console, ranks.format_clock_alignment(job), QUIET)


def _print_fitting_table(
    console: Console, title: str, names: Sequence[str], columns: Sequence[RankColumn], figures: Sequence[Sequence[str]], *,
    beside: tuple[str, Sequence[str]] | None = None, below: Sequence[str] | None = None,
) -> None:  # fmt: skip
    taken = 2 + max((len(text) for text in (beside[0], *beside[1])), default=0) if beside else 0
    known = find_known_columns(figures)
    shown = [[row[k] for k in known] for row in figures]
    least = [columns[k].least and max(1, columns[k].least - taken) for k in known]  # against the width without the last column
    kept, room = fit_columns(console.width - taken, [(columns[k].title, width) for k, width in zip(known, least, strict=True)], shown)
    more = ((beside[0], "left"),) if beside else ()
    table = create_table(((title, "left"), *((columns[known[k]].title, "right") for k in kept), *more))
    for number, (name, row) in enumerate(zip(names, shown, strict=True)):
        table.add_row(*format_cells(shorten_middle(name, room), *(row[k] for k in kept), *([beside[1][number]] if beside else [])))
    print_table_with_details(console, table, below or [""] * len(names))
