"""The ranks of a job beside each other: bars of their steps, who is late and why, the messages between them; a click leads to one rank."""

from __future__ import annotations

from typing import Any

from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import parts
from gpudiag_dashboard.content import ContentPage
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.view import View

from gpudiag.model.job import Job, MessageRow, RankRow
from gpudiag.model.report import ReportData
from gpudiag.report import ranks, ranktables
from gpudiag.report.html.rankfigures import Figure, bars, drawn, shown_parts, traffic, traffic_line
from gpudiag.report.html.ranks import BARS_LABEL, TRAFFIC_LABEL, bars_note, straggler

GRAPH = "ranks-bars"
ON_A_PAGE = 50

_SORTINGS = ("rank", *(column.title for column in ranktables.RANK_COLUMNS))
_WHERE = ranktables.Column("on", "machine, and device where they have several kinds")
_NOT_COMPARED = parts.empty(
    "There is one rank here",
    "The traces of several ranks in one folder, or a bundle that several processes recorded, are one job, and its ranks are compared:",
    parts.code("gpudiag run torchrun --nproc-per-node 8 train.py"),
)


class Ranks(ContentPage):
    """The job of a recording. Query: sort (a column of the ranks), sheet."""

    path, title = "/ranks", "Ranks"
    figure = GRAPH

    def target(self, click: Any, view: View, library: Library) -> str | None:
        """Return the address of the report on the rank of a bar."""
        rank = _clicked(click, library.report(view.bundle or "").data)
        return None if rank is None else _of_rank(view, rank)

    def content(self, view: View, library: Library) -> list[Component]:
        """Return the comparison of the ranks, whichever rank the other pages look at."""
        report = library.report(view.bundle or "").data
        job = report.job
        if job is None:
            return [html.H1("Ranks"), _NOT_COMPARED]
        said = [] if job.straggler else [ranks.straggler_line(report)]
        return [
            html.H1("Ranks"),
            html.P(parts.prose(ranks.headline(report)), className="lead"),
            *(html.P(parts.prose(line), className="absent") for line in ranks.missing_lines(job)),
            *_late(report, view),
            *(html.P(parts.prose(line)) for line in (*said, *ranks.shape_lines(report)) if line),
            *_bars(report),
            *_ranks(report, job, view),
            *_messages(job),
            *_traffic(job),
            parts.quiet(parts.prose(ranks.clocks_line(job))),
        ]


def _of_rank(view: View, rank: int) -> str:
    return View("/overview", view.bundle, view.other).href(rank=rank)


def _clicked(click: Any, report: ReportData) -> int | None:
    """Return the rank of a bar that was clicked; None for what no figure of ours sends."""
    points = click.get("points") if isinstance(click, dict) else None
    rank = points[0].get("customdata") if isinstance(points, list) and points and isinstance(points[0], dict) else None
    known = {row.rank for row in ranks.read_ranks(report.job)} if report.job else set()
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and rank in known else None


def _late(report: ReportData, view: View) -> list[Component]:
    """Return the card of the rank for which the others wait; nothing where there is none."""
    found = straggler(report)
    if found is None:
        return []
    columns = [
        parts.Column("what differs"),
        *(parts.Column(title, True) for title in (f"rank {found['rank']}", "median rank", "difference")),
    ]
    label = f"What takes rank {found['rank']} longer than the median rank"
    table = parts.table(columns, [list(row) for row in found["rows"]], label, css="few") if found["rows"] else None
    link = html.P(parts.link(f"Its own report: rank {found['rank']}", _of_rank(view, found["rank"])))
    return [parts.card(found["title"], html.P(found["why"]), html.P(found["said"]) if found["said"] else None, table, link, tone="warning")]


def _bars(report: ReportData) -> list[Component]:
    """Return the bars with their key; each carries the rank that a click leads to."""
    figure = bars(report)
    if figure is None:
        return []
    leads = [bar.ranks[len(bar.ranks) // 2] for bar in drawn(report)]
    figure = Figure(data=[{**trace, "customdata": leads} for trace in figure["data"]], layout=figure["layout"])
    key = [html.Li([html.Span(className=f"swatch {part.css}"), part.label]) for part in shown_parts(report)]
    note = f"{bars_note(report)} A click on a bar leads to the report on its rank.".strip()
    return [html.Ul(key, className="key", **{"aria-hidden": "true"}), parts.figure(GRAPH, figure, BARS_LABEL), parts.quiet(note)]


# -- tables -------------------------------------------------------------------------------------------------------------------


def _ranks(report: ReportData, job: Job, view: View) -> list[Component]:
    """Return one page of the ranks in the order that the query asks for, each with a link to its own report."""
    sort = view.one_of("sort", _SORTINGS)
    places = ranktables.known_columns([ranktables.rank_figures(row) for row in job.ranks])
    rows = sorted(job.ranks, key=lambda row: _order(row, sort))
    pages = -(-len(rows) // ON_A_PAGE)
    number = min(max(view.number("sheet") or 1, 1), pages)
    shown = rows[(number - 1) * ON_A_PAGE : number * ON_A_PAGE]
    texts = [(ranktables.DIFFERS, ranktables.differences(report)), (_WHERE, ranktables.machines(job))]
    told = [(column, said) for column, said in texts if any(said.values())]
    columns = [
        _column("rank", "rank", "", sort, view, numeric=False),
        *(_column(ranktables.RANK_COLUMNS[k].title, *ranktables.RANK_COLUMNS[k][:2], sort, view) for k in places),
        *(parts.Column(column.title, False, column.help) for column, _ in told),
    ]
    known = ranktables.roles(job)
    cells = [
        [
            _name(row, known, view),
            *(ranktables.rank_figures(row)[k] for k in places),
            *(parts.text(said.get(row.rank, "")) for _, said in told),
        ]
        for row in shown
    ]
    legend = ranktables.legend(job)
    return [
        html.H2("Ranks, means of a step"),
        parts.table(columns, cells, f"Ranks by {sort}, page {number} of {pages}"),
        *parts.pager(view, number, pages),
        *([parts.quiet(legend)] if legend else []),
    ]


def _column(sorting: str, title: str, said: str, sort: str, view: View, *, numeric: bool = True) -> parts.Column:
    now = ("descending" if numeric else "ascending") if sort == sorting else ""
    return parts.Column(title, numeric, said, view.href(sort=None if sorting == "rank" else sorting, sheet=None), now)


def _order(row: RankRow, sort: str) -> tuple[bool, float, int]:
    """Return what a rank is sorted by: figures largest first, those that are not known last."""
    value = dict(zip(_SORTINGS[1:], ranktables.rank_values(row), strict=True)).get(sort, 0.0)
    return value is None, -(value or 0.0), row.rank


def _name(row: RankRow, known: dict[int, str], view: View) -> parts.Cell:
    """Return a rank with the way to its own report; why there is none where it could not be read."""
    if row.wall_ns is None:
        return parts.Cell(f"rank {row.rank}: not read", (parts.text(row.unread, 300),))
    return parts.Cell(ranktables.rank_name(row, known), href=_of_rank(view, row.rank))


def _messages(job: Job) -> list[Component]:
    """Return the kinds of messages between the ranks, those first that take most time."""
    rows = ranktables.message_rows(job)
    if not rows:
        return []
    rows_shown = rows[:ON_A_PAGE]
    known = ranktables.known_columns([ranktables.message_figures(row) for row in rows_shown])
    titles = [ranktables.MESSAGE_COLUMNS[place] for place in known]
    columns = [parts.Column("message"), *(parts.Column(column.title, column.title != "last rank", column.help) for column in titles)]
    note = " ".join(text for text in (ranktables.MESSAGE_LEGEND, ranktables.unmatched_line(rows)) if text)
    more = f" The {ON_A_PAGE} that take most time of {len(rows):,}." if len(rows) > ON_A_PAGE else ""
    table = parts.table(columns, [_message(row, known) for row in rows_shown], "Messages between ranks, matched on all ranks of a group")
    return [html.H2("Messages between ranks"), table, parts.quiet(f"{note}{more}")]


def _message(row: MessageRow, known: list[int]) -> list[parts.Cell | parts.Child]:
    details = tuple(text for text in (ranktables.kernel_name(row), ranktables.group_text(row)) if text)
    figures = ranktables.message_figures(row)
    return [parts.Cell(ranktables.message_name(row), details), *(figures[place] for place in known)]


def _traffic(job: Job) -> list[Component]:
    """Return the map of who has how many bytes for whom; nothing where it is not known."""
    figure, said = traffic(job), parts.prose(traffic_line(job))
    drawing = [html.Div(parts.figure("ranks-traffic", figure, f"{TRAFFIC_LABEL}; {said}"), id="traffic")] if figure else []
    told = [parts.quiet(said)] if said else []
    return [html.H2("Traffic between ranks, bytes of a mean step"), *drawing, *told] if drawing or told else []


PAGE = Ranks()
