"""The ops of a recording: sorted, filtered, summed and cut into pages here, so that a browser never holds more than one page."""

from __future__ import annotations

import shlex
import threading
from collections import OrderedDict

import dash
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import opcells, parts
from gpudiag_dashboard.content import ContentPage
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS, GO
from gpudiag_dashboard.view import View

from gpudiag.errors import GpudiagError
from gpudiag.model.cost import BOUNDS
from gpudiag.model.report import ReportData
from gpudiag.report import words
from gpudiag.report.optable import Group, Grouping, OpTable, Sorting, op_table

ON_A_PAGE = 50
GROUPINGS: tuple[Grouping, ...] = ("op", "signature", "module", "phase", "kernel")
SORTINGS: tuple[Sorting, ...] = ("time", "calls", "flops", "bytes", "efficiency", "ai")
SHAPES = {"op": "op", "signature": "op and shapes", "module": "module", "phase": "phase", "kernel": "kernel"}
"""What one line sums up, in words."""

FIND = "ops-find"


class Ops(ContentPage):
    """The table of ops. Query: group, sort, bound, phase, op (one op alone, by its shapes), find (text in a line), sheet."""

    path, title = "/ops", "Ops"

    def layout(self, view: View) -> Component:
        """Return the text filter, which stays while the table is made anew, and the place of the table."""
        field = dcc.Input(
            id=FIND, type="search", value=view.query.get("find", ""), debounce=0.4, placeholder="text in any column", maxLength=200
        )
        label = html.Label(["Filter", field], className="field", htmlFor=FIND)
        return html.Div([html.H1("Ops"), label, super().layout(view)])

    def register(self, app: dash.Dash, library: Library) -> None:
        """Register the table, and the filter that changes the address."""
        super().register(app, library)

        @app.callback(
            Output(GO, "href", allow_duplicate=True), Input(FIND, "value"), State(ADDRESS, "pathname"), State(ADDRESS, "search"),
            prevent_initial_call=True,
        )  # fmt: skip
        def filtered(text: str | None, pathname: str | None, search: str | None) -> object:
            view = View.parse(pathname, search)
            if view.page != self.path or (text or "") == view.query.get("find", ""):
                return no_update
            return view.href(find=text or None, sheet=None)

        @app.callback(Output(FIND, "value"), Input(ADDRESS, "search"), State(ADDRESS, "pathname"), State(FIND, "value"))
        def went_back(search: str | None, pathname: str | None, text: str | None) -> object:
            view = View.parse(pathname, search)
            known = view.query.get("find", "")
            return no_update if view.page != self.path or (text or "") == known else known

    def content(self, view: View, library: Library) -> list[Component]:
        """Return the choices and the page of the table that they lead to."""
        report = library.report(view.bundle or "", view.rank).data
        chosen = [*_choices(view, report), *_one(view, report)]
        if not report.ops and not report.kernels:
            return [
                parts.empty("No ops were recorded", "Record with shapes: gpudiag.profile does, and torch.profiler with record_shapes=True.")
            ]
        if grouping(view) == "module" and not _by_module(report):
            return [*chosen, parts.empty("Ops are not told apart by module here", "This does it:", parts.code(_command(report)))]
        try:
            table = _table(report, view)
        except GpudiagError as error:
            return [*chosen, parts.error(error.message, error.hint or "")]
        return [*chosen, *_listed(table, view, report)]


def grouping(view: View) -> Grouping:
    """Return what one line sums up: what the query says, else shapes where one op is looked at, else ops."""
    first: Grouping = "signature" if "op" in view.query else "op"
    return next((name for name in GROUPINGS if name == view.query.get("group")), first)


_MOST_TABLES = 32
_lock = threading.Lock()
_tables: OrderedDict[tuple[int, str, str, str | None, str | None], tuple[ReportData, OpTable]] = OrderedDict()


def _table(report: ReportData, view: View) -> OpTable:
    """Return the whole table that the query asks for; kept, since paging and filtering ask for it again. Raises GpudiagError."""
    sort: Sorting = next((name for name in SORTINGS if name == view.query.get("sort")), "time")
    bound = next((name for name in BOUNDS if name == view.query.get("bound")), None)
    key = (id(report), grouping(view), sort, view.query.get("phase"), bound)
    with _lock:
        known = _tables.get(key)
        if known is None or known[0] is not report:
            table = op_table(report, grouping=grouping(view), sorting=sort, phase=view.query.get("phase"), bound=bound)
            known = _tables[key] = (report, table)
        _tables.move_to_end(key)
        while len(_tables) > _MOST_TABLES:
            _tables.popitem(last=False)
        return known[1]


def _choices(view: View, report: ReportData) -> list[Component]:
    """Return the rows of links that change what is shown."""
    phases = sorted({row.phase for row in report.ops if row.phase})
    now = grouping(view)
    groups = [
        (SHAPES[name], view.href(group=name, sheet=None, sort=None), name == now)
        for name in GROUPINGS
        if name != "module" or _by_module(report)
    ]
    bounds = [(name, view.href(bound=name, sheet=None), name == view.query.get("bound")) for name in BOUNDS if _has(report, name)]
    rows = [parts.choice("One line per", groups)]
    rows += [parts.choice("Bound", [("all", view.href(bound=None, sheet=None), "bound" not in view.query), *bounds])] if bounds else []
    if phases and now != "kernel":
        told = [(name, view.href(phase=name, sheet=None), name == view.query.get("phase")) for name in phases]
        rows.append(parts.choice("Phase", [("all", view.href(phase=None, sheet=None), "phase" not in view.query), *told]))
    return rows


def _by_module(report: ReportData) -> bool:
    return any(row.module for row in report.ops)


def _command(report: ReportData) -> str:
    """Return the command that analyses a recording by module: that reads its Python stacks, which takes a while."""
    return f"gpudiag ops {shlex.quote(parts.text(report.source.path, 400))} --group module"


def _has(report: ReportData, bound: str) -> bool:
    return any(row.bound == bound for row in report.ops)


def _one(view: View, report: ReportData) -> list[Component]:
    """Return the line about the one op that the query names, with where else it is seen; nothing where it names none."""
    name = view.query.get("op")
    if name is None:
        return []
    shown = parts.text(name, 160)
    rows = [row for row in report.ops if row.name == name]
    every = parts.link("All ops", view.href(op=None, sheet=None, group=None))
    if not rows:
        return [parts.error(f"no op of this recording is named {shown!r}"), every]
    links = [
        parts.link("On the timeline", view.href("/timeline", op=name)),
        parts.link("On the roofline", view.href("/roofline", op=name)),
        every,
    ]
    said = [html.Li(html.Code(site)) for site in opcells.sites(rows, 5)]
    return [
        html.H2([html.Code(shown), html.Span(f" {opcells.summary(rows, report)}", className="quiet")]),
        *([html.P("Called at:"), html.Ul(said)] if said else []),
        html.Div(links, className="links"),
    ]


def _listed(table: OpTable, view: View, report: ReportData) -> list[Component]:
    """Return one page of the table with how many lines there are."""
    found = [group for group in table.groups if _wanted(group, view)]
    if not found:
        return [parts.empty("No line fits", "Take a filter back.", parts.link("All ops", view.bare.href()))]
    pages = -(-len(found) // ON_A_PAGE)
    number = min(max(view.number("sheet") or 1, 1), pages)
    shown = found[(number - 1) * ON_A_PAGE : number * ON_A_PAGE]
    columns, rows = opcells.columns(table, view), opcells.rows(shown, table, report, view)
    time = sum(group.kernel_ns for group in found)
    return [
        parts.quiet(opcells.count_line(len(found), len(table.groups), time, table)),
        parts.table(columns, rows, f"Ops by {table.sorting}, page {number} of {pages}"),
        *parts.pager(view, number, pages),
        *(parts.quiet(f"{line}.") for line in words.legend(report.ops)),
    ]


def _wanted(group: Group, view: View) -> bool:
    """Return whether a line is of the op that is asked for and holds the text that is looked for."""
    op, text = view.query.get("op"), view.query.get("find", "").strip().lower()
    if op is not None and group.op != op:
        return False
    told = (
        group.name,
        group.op,
        group.signature,
        group.module,
        group.phase,
        group.bound,
        group.engine,
        group.provenance,
        group.kernel_class,
    )
    return not text or any(text in part.lower() for part in told if part)


PAGE = Ops()
