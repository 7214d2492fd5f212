"""The ranks of a job beside each other: bars of their steps, who is late and why, the messages between them; a click leads to one rank."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import Cell, Child, Column, View, clean_long_text, clean_text
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ContentPage

from gpudiag.model.job import Job
from gpudiag.model.report import ReportData
from gpudiag.report import rank_tables, ranks
from gpudiag.report.html.ranks import (
    BARS_LABEL,
    TRAFFIC_LABEL,
    Figure,
    build_bars,
    build_rank_tables,
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

    def target(self, number: int, view: View, library: Library) -> str | None:
        """Return the address of the report on the rank of a bar."""
        job = library.report(view.bundle or "").data.job
        known = {row.rank for row in ranks.select_read_ranks(job)} if job else set()
        return _link_rank(view, number) if number in known else None

    def content(self, view: View, library: Library) -> list[Child]:
        """Return the comparison of the ranks, whichever rank the other pages look at."""
        report = library.report(view.bundle or "").data
        job = report.job
        if job is None:
            return [html.H1("Ranks"), _NOT_COMPARED]
        lines = [] if job.straggler else [ranks.format_straggler(report)]
        lines += ranks.list_parallelism_lines(report)
        # The bars with their key; each carries the rank that a click leads to
        bars: list[Child] = []
        if (chart := draw_rank_bars(report)) is not None:
            leads = [bar.ranks[len(bar.ranks) // 2] for bar in build_bars(report)]
            chart = Figure(data=[{**trace, "customdata": leads} for trace in chart["data"]], layout=chart["layout"])
            key = [html.Li([html.Span(className=f"swatch {part.css}"), part.label]) for part in select_bar_parts(report)]
            note = f"{format_bars_note(report)} A click on a bar leads to the report on its rank.".strip()
            bars = [html.Ul(key, className="key", **{"aria-hidden": "true"}), components.build_figure(GRAPH, chart, BARS_LABEL)]
            bars.append(components.build_quiet(note))
        # Who has how many bytes for whom
        figure, traffic = draw_traffic(job), clean_long_text(format_traffic(job))
        drawing = (
            html.Div(components.build_figure("ranks-traffic", figure, f"{TRAFFIC_LABEL}; {traffic}"), id="traffic") if figure else None
        )
        return [
            html.H1("Ranks"),
            html.P(clean_long_text(ranks.format_ranks_headline(report)), className="lead"),
            *(html.P(clean_long_text(line), className="absent") for line in ranks.list_missing_ranks(job)),
            _build_straggler(report, view),
            *(html.P(clean_long_text(line)) for line in lines if line),
            *bars,
            *_build_ranks(report, job, view),
            *_build_messages(report, job),
            html.H2("Traffic between ranks, bytes of a mean step") if drawing or traffic else None,
            drawing,
            components.build_quiet(traffic) if traffic else None,
            components.build_quiet(clean_long_text(ranks.format_clock_alignment(job))),
        ]


def _link_rank(view: View, rank: int) -> str:
    return View("/overview", view.bundle, view.other).href(rank=rank)


def _build_straggler(report: ReportData, view: View) -> Component | None:
    values = build_straggler_card(report)
    if values is None:
        return None
    name = f"rank {values['rank']}"
    table = None
    if values["rows"]:
        columns = [Column("what differs"), *(Column(title, True) for title in (name, "median rank", "difference"))]
        rows = [list(row) for row in values["rows"]]
        table = components.build_table(columns, rows, f"What takes {name} longer than the median rank", css="few")
    link = html.P(components.build_link(f"Its own report: {name}", _link_rank(view, values["rank"])))
    said = html.P(values["said"]) if values["said"] else None
    return components.build_card(values["title"], html.P(values["why"]), said, table, link, tone="warning")


def _build_ranks(report: ReportData, job: Job, view: View) -> list[Component]:
    sort = view.one_of("sort", _SORTINGS)
    values = {row.rank: dict(zip(_SORTINGS[1:], rank_tables.list_rank_values(row), strict=True)).get(sort, 0.0) for row in job.ranks}
    ranked = sorted(job.ranks, key=lambda row: (values[row.rank] is None, -(values[row.rank] or 0.0), row.rank))
    shown, number, pages = components.choose_page(view, ranked, ON_A_PAGE)
    places = rank_tables.find_known_columns([rank_tables.format_rank_figures(row) for row in job.ranks])
    columns = []
    for sorting, title, said in (
        ("rank", "rank", ""),
        *((rank_tables.RANK_COLUMNS[k].title, *rank_tables.RANK_COLUMNS[k][:2]) for k in places),
    ):
        numeric = sorting != "rank"
        direction = ("descending" if numeric else "ascending") if sort == sorting else ""
        columns.append(Column(title, numeric, said, view.href(sort=sorting if numeric else None, sheet=None), direction))
    texts = [(rank_tables.DIFFERS, rank_tables.find_largest_differences(report)), (_WHERE, rank_tables.name_machines(job))]
    texts = [(column, by_rank) for column, by_rank in texts if any(by_rank.values())]
    columns += [Column(column.title, False, column.help) for column, _ in texts]
    roles = rank_tables.find_rank_roles(job)
    rows = []
    for row in shown:
        name = Cell(rank_tables.name_rank(row, roles), href=_link_rank(view, row.rank))
        if row.wall_ns is None:
            name = Cell(f"rank {row.rank}: not read", (clean_text(row.unread, 300),))
        figures = rank_tables.format_rank_figures(row)
        rows.append([name, *(figures[k] for k in places), *(clean_text(by_rank.get(row.rank, "")) for _, by_rank in texts)])
    legend = rank_tables.format_rank_legend(job)
    return [
        html.H2("Ranks, means of a step"),
        components.build_table(columns, rows, f"Ranks by {sort}, page {number} of {pages}"),
        *components.build_pager(view, number, pages),
        *([components.build_quiet(legend)] if legend else []),
    ]


def _build_messages(report: ReportData, job: Job) -> list[Component]:
    _, table = build_rank_tables(report)
    if not table.page:
        return []
    columns = [Column(column.title, column.numeric, column.help) for column in table.views[0].columns]
    rows = [[Cell(cell.text, cell.details) for cell in row.cells] for row in table.page]
    notes = (rank_tables.MESSAGE_LEGEND, rank_tables.format_unmatched(job.messages), f"{table.count}.")
    shown = components.build_table(columns, rows, "Messages between ranks, matched on all ranks of a group")
    return [html.H2("Messages between ranks"), shown, components.build_quiet(" ".join(text for text in notes if text))]


PAGE = Ranks()
