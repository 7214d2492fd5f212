"""The ranks of a job and their messages: tables, the straggler, charts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gpudiag.model.event_labels import format_kernel_name
from gpudiag.model.job import Job, MessageRow, RankRow
from gpudiag.model.report import ReportData
from gpudiag.model.timeline import BUCKETS
from gpudiag.report import labels, rank_charts, ranks
from gpudiag.report.blocks import (
    PAGES,
    Amount,
    Block,
    Card,
    Cell,
    Chart,
    Column,
    Heading,
    Paragraph,
    Section,
    Table,
    build_count_cell,
    build_row,
    build_section,
    build_time_cell,
    say,
    say_all,
)
from gpudiag.report.console import clean
from gpudiag.report.labels import name_collective
from gpudiag.report.ranks import find_rank_roles, format_ranges, name_rank, select_read_ranks
from gpudiag.units import format_bytes, format_ns, format_rate, format_share

FEW_RANKS = 8
"""Ranks that a terminal lists whole; of more only those that stand out."""

_WORTH_TELLING = 0.01
"""Share of the median step below which a part that differs is not told."""


RANK_COLUMNS = (
    Column("step", "number", "mean of its analysed steps"),
    Column("own", "number", "the step without wait time for ranks that arrive later"),
    Column("wait", "number", "for other ranks: in messages, before the last rank arrives, overlapped or not", 50),
    Column("transfer", "number", "in messages, after the last rank arrives", 90),
    Column("exposed", "number", "exposed communication: not hidden behind other work of the device", 80),
    Column("last", "number", "share of its matched messages in which it arrives last", 66),
)
"""Figures of a rank; times are means of a step."""

DIFFERS = "differs most in"
_BESIDE = 120
"""Columns from which what differs most stands beside the figures."""

MESSAGE_COLUMNS = (
    Column("calls", "number", "of the analysed steps, matched on all ranks of the group", 96),
    Column("median skew", "number", "arrival skew: last arrival less first arrival, the median call", 100),
    Column("mean wait", "number", "mean over calls and ranks: until the last rank arrives"),
    Column("transfer", "number", "mean over calls: from the last arrival to the end", 44),
    Column("bus", "number", "bus bandwidth: bytes over the transfer, times the factor of the collective (NCCL tests), as a link has it",
           60),
    Column("of link", "number", "bus bandwidth over the one-direction rate of the link", 76),
    Column("last rank", "number", "the rank that arrives last most often, and in which share of the calls", 70),
)  # fmt: skip
"""Figures of one kind of message; times are of one call."""

_RANK_LEGEND = (
    "own: the step without wait time for ranks that arrive later. wait and transfer: in messages, before and after the last rank arrives."
)
MESSAGE_LEGEND = "Times are of one call. skew: last arrival less first; wait: until the last rank arrives; transfer: from then to the end."


def select_rank_rows(job: Job, most: int = FEW_RANKS) -> list[RankRow]:
    """Return the ranks that were read if they are at most `most`, else those that stand out (see `find_rank_roles`), by rank."""
    rows = select_read_ranks(job)
    if len(rows) <= max(most, FEW_RANKS):
        return rows
    wanted = set(find_rank_roles(job))
    return [row for row in rows if row.rank in wanted]


def name_machines(job: Job) -> dict[int, str]:
    """Return, by rank, its machine and, where the ranks have devices of several kinds, its device; '' for what is not known."""
    several = len({row.device for row in job.ranks if row.device}) > 1
    told = {row.rank: (row.host, row.device if several else "") for row in job.ranks}
    return {rank: clean(", ".join(text for text in texts if text), 120) for rank, texts in told.items()}


def list_rank_values(row: RankRow) -> list[float | None]:
    """Return the figures of RANK_COLUMNS: times in ns and a share; None for what is not known."""
    return [row.wall_ns, row.own_ns, row.waiting_ns, row.transfer_ns, row.exposed_communication_ns, row.arrived_last_share]


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
    rows = {row.rank: parts for row in select_read_ranks(job) if (parts := rank_charts.split_waits(row)) is not None}
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


def select_message_rows(job: Job) -> list[MessageRow]:
    """Return the kinds of messages, those first that take most of an average rank's time in all analysed steps."""
    return sorted(job.messages, key=lambda row: (-(row.waiting_ns + row.transfer_ns) * row.count, row.kind, row.bytes or 0))


def name_message(row: MessageRow) -> str:
    """Return 'all_reduce, 25.6 MB, 8 ranks'."""
    size = "" if row.bytes is None else format_bytes(row.bytes)
    ranks = f"{len(row.members)} {labels.pluralize(len(row.members), 'rank')}" if row.members else ""
    return ", ".join(text for text in (row.kind or name_collective(row.name), size, ranks) if text)


def format_unmatched(rows: Sequence[MessageRow]) -> str:
    """Return how many calls of single ranks have no partner, '' where all have one."""
    count = sum(row.unmatched for row in rows)
    if not count:
        return ""
    return f"{count:,} {labels.pluralize(count, 'call')} of single ranks were not matched on every rank of the group: not in this table."


def build_ranks_section(report: ReportData, amount: Amount) -> Section | None:
    """Return how the ranks compare: the straggler, their steps, their messages, clocks; None where one rank was analysed alone."""
    job = report.job
    if job is None:
        return None
    said = rank_charts.format_traffic(job) if amount.page else ""
    card = build_straggler_card(report) if amount.page else None
    lines = [*([] if card else [ranks.format_straggler(report)]), *ranks.list_parallelism_lines(report)]
    messages = select_message_rows(job)
    left_out = len(messages) - amount.messages
    more = f"{left_out:,} more {'kind takes' if left_out == 1 else 'kinds take'} less time. " if left_out > 0 else ""
    table, note = build_ranks_table(report, job, amount)
    shown: list[Block | None] = [
        say(ranks.format_ranks_headline(report)) if amount.page else None,
        *say_all(ranks.list_missing_ranks(job), "warning"),
        card,
        *(say_all(lines) if amount.page else []),
    ]
    if amount.page and (bars := rank_charts.draw_rank_bars(report)) is not None:
        key = tuple((part.css, part.label) for part in rank_charts.select_bar_parts(report))
        shown += [Chart("rank-bars", bars, rank_charts.BARS_LABEL, key), say(rank_charts.format_bars_note(report), "quiet")]
    shown += [table, say(note, "quiet"), *([] if amount.page else say_all(lines))]
    if messages:
        notes = f"{more}{MESSAGE_LEGEND} {format_unmatched(messages)}".strip()
        shown += [Heading("Messages between ranks"), build_messages_table(messages[: amount.messages], amount), Paragraph(notes, "quiet")]
    if amount.page and (traffic := rank_charts.draw_traffic(job)) is not None:
        label = f"{rank_charts.TRAFFIC_LABEL}; {said}"
        shown += [Heading("Traffic between ranks", "bytes of a mean step"), Chart("traffic", traffic, label)]
    shown += [say(said, "quiet"), say(ranks.format_clock_alignment(job), "quiet")]
    return build_section(ranks.RANKS_TITLE, shown, "ranks-title", nav="Ranks")


def build_ranks_table(report: ReportData, job: Job, amount: Amount) -> tuple[Table, str]:
    """Return the ranks with their figures, and what is left out and what the titles mean."""
    rows = sorted(job.ranks, key=lambda row: -(row.own_ns or row.wall_ns or 0)) if len(job.ranks) > rank_charts.MOST_LYING else job.ranks
    rows = rows if amount.page else select_rank_rows(job, amount.ops)
    known, differs, where = find_rank_roles(job), find_largest_differences(report), name_machines(job)
    values = [list_rank_values(row) for row in rows]
    shown = [k for k in range(len(RANK_COLUMNS)) if any(row[k] is not None for row in values)]  # one of question marks helps nobody
    made = []
    for row, figures in zip(rows, values, strict=True):
        *times, last = figures
        cells = [*map(build_time_cell, times), Cell("?" if last is None else labels.format_small_share(last), last)]
        read = row.wall_ns is not None
        name = Cell(
            name_rank(row, known) if read else f"rank {row.rank}: not read", row.rank, (row.unread or "",), link=("rank", str(row.rank))
        )
        steps = build_count_cell(row.steps if read else None)
        differ = differs.get(row.rank, "")
        told = "" if amount.document or (row.rank not in known and amount.width < _BESIDE) else differ  # a line each: of what stands out
        made.append(build_row(name, *(cells[k] for k in shown), differ, where[row.rank], steps, detail=told))
    columns = (
        Column("rank", "name"),
        *(RANK_COLUMNS[k] for k in shown),
        Column(DIFFERS, "text", "the part of the step that differs most from the median rank; waiting for other ranks left out", PAGES),
        Column("on", "text", "machine, and device where they have several kinds", PAGES),
        Column("steps", "number", "analysed", PAGES),
    )
    rest = 0 if amount.page else len(ranks.select_read_ranks(job)) - len(rows)
    more = f"{rest:,} more {labels.pluralize(rest, 'rank')} between them: --top {rest + len(rows)} lists all. " if rest else ""
    table = Table(columns, tuple(made), "Ranks: means of a step", "ranks", beside=_BESIDE, beside_title=DIFFERS)
    return table, f"{more}{format_rank_legend(job)}".strip()


def build_messages_table(rows: Sequence[MessageRow], amount: Amount) -> Table:
    """Return the kinds of messages with their figures."""
    made, known = [], [False] * len(MESSAGE_COLUMNS)
    for row in rows:
        last = "?" if row.last_rank is None else f"rank {row.last_rank}"
        last += "" if row.last_rank is None or row.last_share is None else f", {format_share(row.last_share)}"
        rate = "?" if row.busbw_byte_per_s is None else format_rate(row.busbw_byte_per_s, "B")
        figures = (
            build_count_cell(row.count), build_time_cell(row.skew_ns), build_time_cell(row.waiting_ns), build_time_cell(row.transfer_ns),
            Cell(rate, row.busbw_byte_per_s), Cell("?" if row.link_share is None else format_share(row.link_share), row.link_share),
            Cell(last, row.last_share),
        )  # fmt: skip
        known = [before or cell.text != "?" for before, cell in zip(known, figures, strict=True)]
        group = "" if row.group == ",".join(map(str, row.members)) else row.group  # some writers name a group by its ranks
        members = f"ranks {format_ranges(row.members)}" if row.members else ""
        kernel = format_kernel_name(row.name.partition("(")[0])
        name = Cell(name_message(row), details=("" if kernel == row.kind else kernel,) if amount.page else ())
        made.append((name, ": ".join(text for text in (group, members) if text), figures))
    shown = [k for k, is_known in enumerate(known) if is_known]
    columns = (
        Column("message", "name"),
        Column("group", "text", "process group, and its ranks", PAGES),
        *(MESSAGE_COLUMNS[k] for k in shown),
    )
    lines = tuple(build_row(name, group, *(figures[k] for k in shown)) for name, group, figures in made)
    return Table(columns, lines, "Messages between ranks, matched on all ranks of a group", "messages")


def build_straggler_card(report: ReportData) -> Card | None:
    """Return who is late, why, and what takes that rank longer; None without one.

    By how much and since when it is late is left out where a finding says it.
    """
    job = report.job
    if job is None or job.straggler is None:
        return None
    found, name = job.straggler, f"rank {job.straggler.rank}"
    late = "" if ranks.find_straggler_finding(report) else labels.capitalize(ranks.format_straggler_delay(found))
    rows = tuple(build_row(*row) for row in ranks.build_difference_rows(found, report))
    columns = (Column("what differs"), *(Column(title, "number") for title in (name, "median rank", "difference")))
    table = Table(columns, rows, f"What takes {name} longer than the median rank")
    return Card(
        ranks.format_straggler_title(job), (*say_all([ranks.explain_straggler(found), late]), *([table] if rows else [])), "warning"
    )
