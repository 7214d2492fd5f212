"""What the HTML page shows of a job, as plain values: the late rank's card, sentences, the tables of ranks and of messages."""

from __future__ import annotations

from typing import Any

from gpudiag.model.job import Job, MessageRow, RankRow
from gpudiag.model.report import ReportData
from gpudiag.report import ranks, ranktables
from gpudiag.report.escape import clean, prose
from gpudiag.report.html.rankfigures import MOST_BARS, MOST_LYING, WAITS, shown_parts, traffic_line
from gpudiag.report.html.table import Cell, Column, Table, count_cell, name_cell, table_of, told
from gpudiag.report.labels import collective_label
from gpudiag.report.ranktables import MESSAGE_COLUMNS, RANK_COLUMNS
from gpudiag.units import format_bytes

BARS_LABEL = "Mean step of each rank by its parts; the same times stand in the table of ranks"
TRAFFIC_LABEL = "Bytes a step from each rank to each other"


def context(report: ReportData) -> dict[str, Any] | None:
    """Return the values of the template's part on ranks; None where one rank was analysed alone."""
    job = report.job
    if job is None:
        return None
    said = [] if job.straggler else [ranks.straggler_line(report)]
    return {
        "headline": prose(ranks.headline(report)),
        "missing": [prose(text) for text in ranks.missing_lines(job)],
        "lines": [prose(text) for text in (*said, *ranks.shape_lines(report)) if text],
        "straggler": straggler(report),
        "legend": [(part.css, part.label) for part in shown_parts(report)],
        "bars_note": bars_note(report),
        "bars_label": BARS_LABEL,
        "traffic_label": TRAFFIC_LABEL,
        "traffic_note": prose(traffic_line(job)),
        "messages_note": " ".join(text for text in (ranktables.MESSAGE_LEGEND, ranktables.unmatched_line(job.messages)) if text),
        "clocks": prose(ranks.clocks_line(job)),
    }


def bars_note(report: ReportData) -> str:
    """Return how the bars are read."""
    several = report.job is not None and len(ranks.read_ranks(report.job)) > MOST_BARS
    waits = any(part.name == WAITS for part in shown_parts(report))
    said = ["Each bar between the fastest and the slowest rank is the mean of several that take about as long."] if several else []
    said += ["The hatched end of a bar is waiting for ranks that arrive later; what stands before it is own time."] if waits else []
    return " ".join(said)


def straggler(report: ReportData) -> dict[str, Any] | None:
    """Return the card of the late rank: title, sentences, and rows (what, its own, the median rank's, difference); None without one.

    By how much and since when it is late is left out where a finding says it.
    """
    job = report.job
    if job is None or job.straggler is None:
        return None
    found = job.straggler
    return {
        "title": ranks.straggler_title(job),
        "rank": found.rank,
        "said": "" if ranks.straggler_found(report) else prose(ranks.capital(ranks.straggler_said(found))),
        "why": prose(ranks.straggler_cause(found)),
        "rows": ranks.difference_rows(found, report),
    }


def tables(report: ReportData) -> list[Table]:
    """Return the tables of ranks and of messages; none where one rank was analysed alone."""
    return [] if report.job is None else [_ranks(report, report.job), _messages(report.job)]


def _ranks(report: ReportData, job: Job) -> Table:
    known, differs = ranktables.roles(job), ranktables.differences(report)
    shown = ranktables.known_columns([ranktables.rank_figures(row) for row in job.ranks])
    columns = [
        Column("rank", True),
        Column("is"),
        *(Column(RANK_COLUMNS[place].title, True, RANK_COLUMNS[place].help) for place in shown),
        Column(ranktables.DIFFERS.title, False, ranktables.DIFFERS.help),
        Column("on", False, "machine, and device where they have several kinds"),
        Column("steps", True, "analysed"),
    ]
    rows = sorted(job.ranks, key=lambda row: -(row.own_ns or row.wall_ns or 0)) if len(job.ranks) > MOST_LYING else job.ranks
    where = ranktables.machines(job)
    cells = [_rank(row, known.get(row.rank, ""), (differs.get(row.rank, ""), where[row.rank]), shown) for row in rows]
    return table_of("ranks", columns, cells)


def _rank(row: RankRow, role: str, said: tuple[str, str], shown: list[int]) -> tuple[Cell, ...]:
    """Return the cells of a rank; `said`: what differs, and where it ran."""
    texts, values = ranktables.rank_figures(row), ranktables.rank_values(row)
    return (
        Cell(str(row.rank), row.rank),
        Cell(role if row.wall_ns is not None else "not read", details=told(row.unread)),
        *(Cell(texts[place], values[place]) for place in shown),
        *(Cell(clean(text, 160)) for text in said),
        count_cell(row.steps if row.wall_ns is not None else None),
    )


def _messages(job: Job) -> Table:
    rows = ranktables.message_rows(job)
    shown = ranktables.known_columns([_message_texts(row) for row in rows])
    columns = [
        Column("message"),
        Column("group", False, "process group, and its ranks"),
        *(Column(_MESSAGE_COLUMNS[k].title, _MESSAGE_COLUMNS[k].title != "last rank", _MESSAGE_COLUMNS[k].help) for k in shown),
    ]
    return table_of("messages", columns, [_message(row, shown) for row in rows])


_MESSAGE_COLUMNS = (ranktables.Column("bytes", "of one call: the whole tensor"), *MESSAGE_COLUMNS)


def _message_texts(row: MessageRow) -> list[str]:
    return ["?" if row.bytes is None else format_bytes(row.bytes), *ranktables.message_figures(row)]


def _message(row: MessageRow, shown: list[int]) -> tuple[Cell, ...]:
    values = (row.bytes, row.count, row.skew_ns, row.waiting_ns, row.transfer_ns, row.busbw_byte_per_s, row.link_share, None)
    cells = [Cell(text, value) for text, value in zip(_message_texts(row), values, strict=True)]
    name = Cell(clean(row.kind or collective_label(row.name), 120), details=told(ranktables.kernel_name(row)))
    return name, name_cell(ranktables.group_text(row)), *(cells[place] for place in shown)
