"""The ranks of a job in a terminal: the ranks that stand out, the late one, the messages between them, and what was not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpudiag.model.job import Job
from gpudiag.model.report import ReportData
from gpudiag.report import ranks, ranktables, words
from gpudiag.report.console import QUIET, cells, fitting, heading, line, new_table, print_with_details
from gpudiag.report.escape import clean, middle

if TYPE_CHECKING:
    from rich.console import Console


def section(console: Console, report: ReportData, top: int) -> None:
    """Print how the ranks compare, `top` of them where there are no more; nothing where one rank was analysed alone."""
    job = report.job
    if job is None:
        return
    heading(console, ranks.TITLE)
    for said in ranks.missing_lines(job):
        line(console, said, "yellow")
    _table(console, report, job, top)
    told = [text for text in (ranks.straggler_line(report), *ranks.shape_lines(report)) if text]
    if told:
        console.print()
    for said in told:
        line(console, said)
    _messages(console, job)
    line(console, ranks.clocks_line(job), QUIET)


def _table(console: Console, report: ReportData, job: Job, top: int) -> None:
    rows = ranktables.rank_rows(job, top)
    known, differs = ranktables.roles(job), ranktables.differences(report)
    names = [ranktables.rank_name(row, known) for row in rows]
    beside = console.width >= ranktables.DIFFERS.least and any(row.rank in differs for row in rows)
    told = [clean(differs.get(row.rank, "")) for row in rows]
    below = [text if row.rank in known else "" for row, text in zip(rows, told, strict=True)]  # a line each: only where a rank stands out
    _print(
        console, "rank", names, ranktables.RANK_COLUMNS, [ranktables.rank_figures(row) for row in rows],
        beside=(ranktables.DIFFERS.title, told) if beside else None, below=None if beside else below,
    )  # fmt: skip
    rest = len(ranks.read_ranks(job)) - len(rows)
    more = f"{rest:,} more {words.plural(rest, 'rank')} between them: --top {rest + len(rows)} lists all. " if rest else ""
    if said := f"{more}{ranktables.legend(job)}".strip():
        line(console, said, QUIET)


def _messages(console: Console, job: Job) -> None:
    found = ranktables.message_rows(job)
    if not found:
        return
    rows = found[: ranktables.MOST_MESSAGES]
    heading(console, "Messages between ranks")
    names = [ranktables.message_name(row) for row in rows]
    _print(console, "message", names, ranktables.MESSAGE_COLUMNS, [ranktables.message_figures(row) for row in rows])
    less = len(found) - len(rows)
    more = f"{less:,} more {'kind takes' if less == 1 else 'kinds take'} less time. " if less else ""
    line(console, f"{more}{ranktables.MESSAGE_LEGEND} {ranktables.unmatched_line(found)}".strip(), QUIET)


def _print(
    console: Console, title: str, names: Sequence[str], columns: Sequence[ranktables.Column], figures: Sequence[Sequence[str]], *,
    beside: tuple[str, Sequence[str]] | None = None, below: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Print a table with as many figures as the width allows; `beside`: a last column of text, `below`: a line under each row."""
    taken = 2 + max((len(text) for text in (beside[0], *beside[1])), default=0) if beside else 0
    known = ranktables.known_columns(figures)
    shown = [[row[k] for k in known] for row in figures]
    least = [columns[k].least and max(1, columns[k].least - taken) for k in known]  # against the width without the last column
    kept, room = fitting(console.width - taken, [(columns[k].title, width) for k, width in zip(known, least, strict=True)], shown)
    more = ((beside[0], "left"),) if beside else ()
    table = new_table(((title, "left"), *((columns[known[k]].title, "right") for k in kept), *more))
    for number, (name, row) in enumerate(zip(names, shown, strict=True)):
        table.add_row(*cells(middle(name, room), *(row[k] for k in kept), *([beside[1][number]] if beside else [])))
    print_with_details(console, table, below or [""] * len(names))
