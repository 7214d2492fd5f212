"""The ranks of a job beside each other: bars of their steps, who is late and why, the messages between them; a click leads to one rank."""

from __future__ import annotations

from typing import Any

from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import View
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ContentPage

from gpudiag.model.job import Job, MessageRow, RankRow
from gpudiag.model.report import ReportData
from gpudiag.report import rank_tables, ranks
from gpudiag.report.html.ranks import (
    BARS_LABEL,
    TRAFFIC_LABEL,
    Figure,
    build_bars,
    build_straggler_card,
    draw_rank_bars,
    draw_traffic,
    format_bars_note,
    format_traffic,
    select_bar_parts,
)

GRAPH = "ranks-bars"
ON_A_PAGE = 50

_SORTINGS = ("rank", *(column.title for column in rank_tables.RANK_COLUMNS))
_WHERE = rank_tables.RankColumn("on", "machine, and device where they have several kinds")
_NOT_COMPARED = components.build_empty(
    "There is one rank here",
    "The traces of several ranks in one folder, or a bundle that several processes recorded, are one job, and its ranks are compared:",
    components.build_code("gpudiag run torchrun --nproc-per-node 8 train.py"),
)


class Ranks(ContentPage):
    """The job of a recording. Query: sort (a column of the ranks), sheet."""

    path, title = "/ranks", "Ranks"
    figure = GRAPH

    def target(self, click: Any, view: View, library: Library) -> str | None:
        """Return the address of the report on the rank of a bar."""
        rank = _find_clicked_rank(click, library.report(view.bundle or "").data)
        return None if rank is None else _link_rank(view, rank)

    def content(self, view: View, library: Library) -> list[Component]:
        """Return the comparison of the ranks, whichever rank the other pages look at."""
        report = library.report(view.bundle or "").data
        job = report.job
        if job is None:
            return [html.H1("Ranks"), _NOT_COMPARED]
        said = [] if job.straggler else [ranks.format_straggler(report)]
        return [
            html.H1("Ranks"),
            html.P(components.clean_long_text(ranks.format_ranks_headline(report)), className="lead"),
            *(html.P(components.clean_long_text(line), className="absent") for line in ranks.list_missing_ranks(job)),
            *_build_straggler(report, view),
            *(html.P(components.clean_long_text(line)) for line in (*said, *ranks.list_parallelism_lines(report)) if line),
            *_build_bars(report),
            *_build_ranks(report, job, view),
            *_build_messages(job),
            *_build_traffic(job),
            components.build_quiet(components.clean_long_text(ranks.format_clock_alignment(job))),
        ]


def _link_rank(view: View, rank: int) -> str:
    return View("/overview", view.bundle, view.other).href(rank=rank)


def _find_clicked_rank(click: Any, report: ReportData) -> int | None:
    """Return the rank of a bar that was clicked; None for what no figure of ours sends."""
    points = click.get("points") if isinstance(click, dict) else None
    rank = points[0].get("customdata") if isinstance(points, list) and points and isinstance(points[0], dict) else None
    known = {row.rank for row in ranks.select_read_ranks(report.job)} if report.job else set()
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and rank in known else None


def _build_straggler(report: ReportData, view: View) -> list[Component]:
    """Return the card of the rank for which the others wait; nothing where there is none."""
    found = build_straggler_card(report)
    if found is None:
        return []
    columns = [
        components.Column("what differs"),
        *(components.Column(title, True) for title in (f"rank {found['rank']}", "median rank", "difference")),
    ]
    label = f"What takes rank {found['rank']} longer than the median rank"
    table = components.build_table(columns, [list(row) for row in found["rows"]], label, css="few") if found["rows"] else None
    link = html.P(components.build_link(f"Its own report: rank {found['rank']}", _link_rank(view, found["rank"])))
    return [
        components.build_card(
            found["title"], html.P(found["why"]), html.P(found["said"]) if found["said"] else None, table, link, tone="warning"
        )
    ]


def _build_bars(report: ReportData) -> list[Component]:
    """Return the bars with their key; each carries the rank that a click leads to."""
    figure = draw_rank_bars(report)
    if figure is None:
        return []
    leads = [bar.ranks[len(bar.ranks) // 2] for bar in build_bars(report)]
    figure = Figure(data=[{**trace, "customdata": leads} for trace in figure["data"]], layout=figure["layout"])
    key = [html.Li([html.Span(className=f"swatch {part.css}"), part.label]) for part in select_bar_parts(report)]
    note = f"{format_bars_note(report)} A click on a bar leads to the report on its rank.".strip()
    return [
        html.Ul(key, className="key", **{"aria-hidden": "true"}),
        components.build_figure(GRAPH, figure, BARS_LABEL),
        components.build_quiet(note),
    ]


# -- tables -------------------------------------------------------------------------------------------------------------------


def _build_ranks(report: ReportData, job: Job, view: View) -> list[Component]:
    """Return one page of the ranks in the order that the query asks for, each with a link to its own report."""
    sort = view.one_of("sort", _SORTINGS)
    places = rank_tables.find_known_columns([rank_tables.format_rank_figures(row) for row in job.ranks])
    rows = sorted(job.ranks, key=lambda row: _build_sort_key(row, sort))
    pages = -(-len(rows) // ON_A_PAGE)
    number = min(max(view.number("sheet") or 1, 1), pages)
    shown = rows[(number - 1) * ON_A_PAGE : number * ON_A_PAGE]
    texts = [(rank_tables.DIFFERS, rank_tables.find_largest_differences(report)), (_WHERE, rank_tables.name_machines(job))]
    told = [(column, said) for column, said in texts if any(said.values())]
    columns = [
        _build_column("rank", "rank", "", sort, view, numeric=False),
        *(_build_column(rank_tables.RANK_COLUMNS[k].title, *rank_tables.RANK_COLUMNS[k][:2], sort, view) for k in places),
        *(components.Column(column.title, False, column.help) for column, _ in told),
    ]
    known = rank_tables.find_rank_roles(job)
    cells = [
        [
            _build_name_cell(row, known, view),
            *(rank_tables.format_rank_figures(row)[k] for k in places),
            *(components.clean_text(said.get(row.rank, "")) for _, said in told),
        ]
        for row in shown
    ]
    legend = rank_tables.format_rank_legend(job)
    return [
        html.H2("Ranks, means of a step"),
        components.build_table(columns, cells, f"Ranks by {sort}, page {number} of {pages}"),
        *components.build_pager(view, number, pages),
        *([components.build_quiet(legend)] if legend else []),
    ]


def _build_column(sorting: str, title: str, said: str, sort: str, view: View, *, numeric: bool = True) -> components.Column:
    now = ("descending" if numeric else "ascending") if sort == sorting else ""
    return components.Column(title, numeric, said, view.href(sort=None if sorting == "rank" else sorting, sheet=None), now)


def _build_sort_key(row: RankRow, sort: str) -> tuple[bool, float, int]:
    """Return what a rank is sorted by: figures largest first, those that are not known last."""
    value = dict(zip(_SORTINGS[1:], rank_tables.list_rank_values(row), strict=True)).get(sort, 0.0)
    return value is None, -(value or 0.0), row.rank


def _build_name_cell(row: RankRow, known: dict[int, str], view: View) -> components.Cell:
    """Return a rank with the way to its own report; why there is none where it could not be read."""
    if row.wall_ns is None:
        return components.Cell(f"rank {row.rank}: not read", (components.clean_text(row.unread, 300),))
    return components.Cell(rank_tables.name_rank(row, known), href=_link_rank(view, row.rank))


def _build_messages(job: Job) -> list[Component]:
    """Return the kinds of messages between the ranks, those first that take most time."""
    rows = rank_tables.select_message_rows(job)
    if not rows:
        return []
    rows_shown = rows[:ON_A_PAGE]
    known = rank_tables.find_known_columns([rank_tables.format_message_figures(row) for row in rows_shown])
    titles = [rank_tables.MESSAGE_COLUMNS[place] for place in known]
    columns = [
        components.Column("message"),
        *(components.Column(column.title, column.title != "last rank", column.help) for column in titles),
    ]
    note = " ".join(text for text in (rank_tables.MESSAGE_LEGEND, rank_tables.format_unmatched(rows)) if text)
    more = f" The {ON_A_PAGE} that take most time of {len(rows):,}." if len(rows) > ON_A_PAGE else ""
    table = components.build_table(
        columns, [_build_message_row(row, known) for row in rows_shown], "Messages between ranks, matched on all ranks of a group"
    )
    return [html.H2("Messages between ranks"), table, components.build_quiet(f"{note}{more}")]


def _build_message_row(row: MessageRow, known: list[int]) -> list[components.Cell | components.Child]:
    details = tuple(text for text in (rank_tables.name_message_kernel(row), rank_tables.format_group(row)) if text)
    figures = rank_tables.format_message_figures(row)
    return [components.Cell(rank_tables.name_message(row), details), *(figures[place] for place in known)]


def _build_traffic(job: Job) -> list[Component]:
    """Return the map of who has how many bytes for whom; nothing where it is not known."""
    figure, said = draw_traffic(job), components.clean_long_text(format_traffic(job))
    drawing = [html.Div(components.build_figure("ranks-traffic", figure, f"{TRAFFIC_LABEL}; {said}"), id="traffic")] if figure else []
    told = [components.build_quiet(said)] if said else []
    return [html.H2("Traffic between ranks, bytes of a mean step"), *drawing, *told] if drawing or told else []


PAGE = Ranks()
