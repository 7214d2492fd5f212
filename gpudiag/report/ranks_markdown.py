"""The ranks of a job as a section of Markdown: the same as in a terminal, with every figure."""

from __future__ import annotations

from gpudiag.model.job import Job
from gpudiag.model.report import ReportData
from gpudiag.report import ranks, ranktables
from gpudiag.report.escape import code, markdown
from gpudiag.report.marktable import table as _table


def section(report: ReportData, top: int) -> str:
    """Return how the ranks compare, `top` of them where there are no more; '' where one rank was analysed alone."""
    job = report.job
    if job is None:
        return ""
    said = [*ranks.missing_lines(job), ranks.straggler_line(report), *ranks.shape_lines(report)]
    listed = "\n".join(f"- {markdown(text)}" for text in said if text)
    blocks = (f"## {ranks.TITLE}", _ranks(report, job, top), listed, _messages(job), markdown(ranks.clocks_line(job)))
    return "\n\n".join(block for block in blocks if block)


def _ranks(report: ReportData, job: Job, top: int) -> str:
    rows = ranktables.rank_rows(job, top)
    known, differs = ranktables.roles(job), ranktables.differences(report)
    figures = [ranktables.rank_figures(row) for row in rows]
    shown = ranktables.known_columns(figures)
    more = [ranktables.DIFFERS.title] if differs else []
    cells = [
        (ranktables.rank_name(row, known), *(texts[place] for place in shown), *(markdown(differs.get(row.rank, ""), 160) for _ in more))
        for row, texts in zip(rows, figures, strict=True)
    ]
    titles = ("rank", *(ranktables.RANK_COLUMNS[place].title for place in shown), *more)
    table = _table(titles, f"l{'r' * len(shown)}{'l' * len(more)}", cells)
    rest = len(ranks.read_ranks(job)) - len(rows)
    return f"{table}\n\n{f'{rest:,} more ranks lie between them. ' if rest else ''}{ranktables.legend(job)}".strip()


def _messages(job: Job) -> str:
    found = ranktables.message_rows(job)
    if not found:
        return ""
    rows = found[: 2 * ranktables.MOST_MESSAGES]
    figures = [ranktables.message_figures(row) for row in rows]
    known = ranktables.known_columns(figures)
    titles = ("message", *(ranktables.MESSAGE_COLUMNS[place].title for place in known))
    names = [code(ranktables.message_name(row), cell=True) for row in rows]
    table = _table(
        titles, f"l{'r' * len(known)}", [(name, *(row[place] for place in known)) for name, row in zip(names, figures, strict=True)]
    )
    notes = (ranktables.MESSAGE_LEGEND, ranktables.unmatched_line(found))
    return f"### Messages between ranks\n\n{table}\n\n{' '.join(text for text in notes if text)}"
