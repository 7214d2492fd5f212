"""The ops of a recording: sorted, filtered, grouped and paged on the server."""

from __future__ import annotations

import shlex
import threading
from collections import OrderedDict
from collections.abc import Sequence

import dash
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import View
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ADDRESS, GO, ContentPage

from gpudiag.errors import GpudiagError
from gpudiag.model.ops import BOUNDS
from gpudiag.model.report import OpRow, ReportData
from gpudiag.report import labels
from gpudiag.report.labels import format_site
from gpudiag.report.op_table import Grouping, KnownSum, OpGroup, OpTable, Sorting, build_op_table
from gpudiag.units import format_ns, format_share

_LONGEST = 200


def build_columns(table: OpTable, view: View) -> list[components.Column]:
    """Return the columns; a click on a title sorts by it."""
    named = (
        "kernel"
        if table.grouping == "kernel"
        else "phase"
        if table.grouping == "phase"
        else "module"
        if table.grouping == "module"
        else "op"
    )
    told = [
        components.Column(named),
        _build_sort_column("calls", "calls", table, view),
        _build_sort_column("time", "time", table, view, "summed time of the kernels"),
        components.Column("share", True, "of the time of all ops"),
        components.Column("bound", False, "what limits most of its time"),
    ]
    if table.grouping == "kernel":
        return [*told, components.Column("launched by", False, "attributed op: it launched most of its time")]
    return [
        *told,
        _build_sort_column("of roofline", "efficiency", table, view, "roofline time / measured time; the lowest first"),
        _build_sort_column("work", "flops", table, view, "achieved rate; sorted by the amount of work"),
        _build_sort_column("traffic", "bytes", table, view, "achieved rate of compulsory traffic; sorted by the amount"),
        _build_sort_column("FLOP/B", "ai", table, view, "arithmetic intensity"),
        components.Column("cost", False, "where FLOPs and bytes come from, and the peak judged against"),
    ]


def _build_sort_column(title: str, sorting: Sorting, table: OpTable, view: View, said: str = "") -> components.Column:
    direction = "ascending" if sorting == "efficiency" else "descending"
    now = direction if table.sorting == sorting else ""
    return components.Column(title, True, said, view.href(sort=None if sorting == "time" else sorting, sheet=None), now)


def build_rows(groups: Sequence[OpGroup], table: OpTable, report: ReportData, view: View) -> list[list[components.Cell]]:
    """Return the cells of each line."""
    units = labels.choose_flop_unit(report), labels.choose_byte_unit(report)
    return [_build_row(group, table, units, view) for group in groups]


def _build_row(group: OpGroup, table: OpTable, units: tuple[tuple[str, float], tuple[str, float]], view: View) -> list[components.Cell]:
    cells = [
        _build_name_cell(group, table, view),
        components.Cell(f"{group.calls:,}"),
        components.Cell(format_ns(group.kernel_ns)),
        components.Cell("?" if group.share is None else format_share(group.share, 1)),
        components.Cell(group.bound),
    ]
    if table.grouping == "kernel":
        return [
            *cells,
            components.Cell(components.clean_text(group.op or "", _LONGEST), href=view.href("/ops", op=group.op) if group.op else ""),
        ]
    (flop_unit, flop_factor), (byte_unit, byte_factor) = units
    cost = tuple(text for text in (f"{group.engine} peak" if group.engine else "", _format_fill(group)) if text)
    over_roof = group.efficiency is None and group.over_roof_ns
    efficiency = labels.OVER_ROOF if over_roof else labels.format_number(group.efficiency, 100, " %")
    # How much of the time the efficiency speaks of, where that is not all of it
    if group.efficiency is None or group.judged_share >= 1 - labels.ROUNDS_TO_ZERO:
        judged_part = ()
    else:
        judged_part = (f"of {format_share(group.judged_share)} of the time",)
    return [
        *cells,
        components.Cell(efficiency, judged_part),
        components.Cell(_format_rate(group.flops, flop_factor, flop_unit)),
        components.Cell(_format_rate(group.bytes, byte_factor, byte_unit)),
        components.Cell(labels.format_number(group.intensity)),
        components.Cell(group.provenance or "several", cost),
    ]


def _build_name_cell(group: OpGroup, table: OpTable, view: View) -> components.Cell:
    """Return the cell that names a line; it leads to the op by shapes, or (by phase) to the ops of that phase."""
    name = components.clean_text(group.name, _LONGEST)
    if table.grouping == "phase":
        return components.Cell(name, href=view.href(group=None, phase=group.phase, sheet=None) if group.phase else "")
    if table.grouping in ("kernel", "module"):
        return components.Cell(name, (group.kernel_class.replace("_", " "),) if group.kernel_class else ())
    details = [group.module, group.phase, group.signature if table.grouping == "signature" else None]
    told = tuple(components.clean_text(text, 240) for text in details if text)
    alone = table.grouping == "signature" and view.query.get("op") == group.op
    return components.Cell(name, told, href=view.href(op=group.op, group=None, sheet=None) if group.op and not alone else "")


def _format_rate(known: KnownSum, factor: float, unit: str) -> str:
    rate = labels.compute_rate(known.value, known.ns)
    return "?" if rate is None else f"{labels.format_number(rate, factor)} {unit}"


def _format_fill(group: OpGroup) -> str:
    waves = "" if group.waves is None else f"{labels.format_number(group.waves)} waves"
    occupancy = "" if group.occupancy is None else f"{labels.format_number(group.occupancy, 100, ' %')} occupied"
    return ", ".join(text for text in (waves, occupancy) if text)


def format_count_line(found: int, of: int, time_ns: int, table: OpTable) -> str:
    """Return how many lines there are, how much of the time they take, and whether small ones were left out of the report."""
    lines = f"{found:,} row{'' if found == 1 else 's'}" if found == of else f"{found:,} of {of:,} rows"
    share = f", {format_share(time_ns / table.total_ns, 1)} of all" if table.total_ns else ""
    cut = f"; the report keeps the {table.cut:,} largest kernels" if table.cut else ""
    return f"{lines}: {format_ns(time_ns)}{share}{cut}"


def summarize_op(rows: Sequence[OpRow], report: ReportData) -> str:
    """Return calls, time and share of one op over all its shapes."""
    time, total = labels.sum_op_ns(rows), labels.sum_op_ns(report.ops)
    share = f", {format_share(time / total, 1)} of the time of all ops" if total else ""
    return f"{sum(row.count for row in rows):,} calls, {format_ns(time)}{share}"


def list_call_sites(rows: Sequence[OpRow], most: int) -> list[str]:
    """Return the places in code that call these ops, the most expensive first."""
    ranked = sorted((row for row in rows if row.where), key=lambda row: -row.kernel_ns)
    return list(dict.fromkeys(components.clean_text(format_site(row.where), _LONGEST) for row in ranked))[:most]


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
        chosen = [*_build_choices(view, report), *_build_op_summary(view, report)]
        if not report.ops and not report.kernels:
            return [
                components.build_empty(
                    "No ops were recorded", "Record with shapes: gpudiag.profile does, and torch.profiler with record_shapes=True."
                )
            ]
        if choose_grouping(view) == "module" and not _build_module_hint(report):
            return [
                *chosen,
                components.build_empty(
                    "Modules are unavailable here",
                    "This does it:",
                    components.build_code(f"gpudiag ops {shlex.quote(components.clean_text(report.source.path, 400))} --group module"),
                ),
            ]
        try:
            table = _load_table(report, view)
        except GpudiagError as error:
            return [*chosen, components.build_error(error.message, error.hint or "")]
        return [*chosen, *_build_listing(table, view, report)]


def choose_grouping(view: View) -> Grouping:
    """Return what one line sums up: what the query says, else shapes where one op is looked at, else ops."""
    first: Grouping = "signature" if "op" in view.query else "op"
    return next((name for name in GROUPINGS if name == view.query.get("group")), first)


_MOST_TABLES = 32
_lock = threading.Lock()
_tables: OrderedDict[tuple[int, str, str, str | None, str | None], tuple[ReportData, OpTable]] = OrderedDict()


def _load_table(report: ReportData, view: View) -> OpTable:
    """Return the whole table that the query asks for; kept, since paging and filtering ask for it again. Raises GpudiagError."""
    sort: Sorting = next((name for name in SORTINGS if name == view.query.get("sort")), "time")
    bound = next((name for name in BOUNDS if name == view.query.get("bound")), None)
    key = (id(report), choose_grouping(view), sort, view.query.get("phase"), bound)
    with _lock:
        known = _tables.get(key)
        if known is None or known[0] is not report:
            table = build_op_table(report, grouping=choose_grouping(view), sorting=sort, phase=view.query.get("phase"), bound=bound)
            known = _tables[key] = (report, table)
        _tables.move_to_end(key)
        while len(_tables) > _MOST_TABLES:
            _tables.popitem(last=False)
        return known[1]


def _build_choices(view: View, report: ReportData) -> list[Component]:
    """Return the rows of links that change what is shown."""
    phases = sorted({row.phase for row in report.ops if row.phase})
    now = choose_grouping(view)
    groups = [
        (SHAPES[name], view.href(group=name, sheet=None, sort=None), name == now)
        for name in GROUPINGS
        if name != "module" or _build_module_hint(report)
    ]
    bounds = [
        (name, view.href(bound=name, sheet=None), name == view.query.get("bound"))
        for name in BOUNDS
        if any(row.bound == name for row in report.ops)
    ]
    rows = [components.build_choice("Group by", groups)]
    rows += (
        [components.build_choice("Bound", [("all", view.href(bound=None, sheet=None), "bound" not in view.query), *bounds])]
        if bounds
        else []
    )
    if phases and now != "kernel":
        told = [(name, view.href(phase=name, sheet=None), name == view.query.get("phase")) for name in phases]
        rows.append(components.build_choice("Phase", [("all", view.href(phase=None, sheet=None), "phase" not in view.query), *told]))
    return rows


def _build_module_hint(report: ReportData) -> bool:
    return any(row.module for row in report.ops)


def _build_op_summary(view: View, report: ReportData) -> list[Component]:
    """Return the line about the one op that the query names, with where else it is seen; nothing where it names none."""
    name = view.query.get("op")
    if name is None:
        return []
    shown = components.clean_text(name, 160)
    rows = [row for row in report.ops if row.name == name]
    every = components.build_link("All ops", view.href(op=None, sheet=None, group=None))
    if not rows:
        return [components.build_error(f"no op of this recording is named {shown!r}"), every]
    links = [
        components.build_link("On the timeline", view.href("/timeline", op=name)),
        components.build_link("On the roofline", view.href("/roofline", op=name)),
        every,
    ]
    said = [html.Li(html.Code(site)) for site in list_call_sites(rows, 5)]
    return [
        html.H2([html.Code(shown), html.Span(f" {summarize_op(rows, report)}", className="quiet")]),
        *([html.P("Call sites:"), html.Ul(said)] if said else []),
        html.Div(links, className="links"),
    ]


def _build_listing(table: OpTable, view: View, report: ReportData) -> list[Component]:
    """Return one page of the table with how many lines there are."""
    found = [group for group in table.groups if _is_wanted(group, view)]
    if not found:
        return [components.build_empty("No row matches", "Remove a filter.", components.build_link("All ops", view.bare.href()))]
    pages = -(-len(found) // ON_A_PAGE)
    number = min(max(view.number("sheet") or 1, 1), pages)
    shown = found[(number - 1) * ON_A_PAGE : number * ON_A_PAGE]
    columns, rows = build_columns(table, view), build_rows(shown, table, report, view)
    time = sum(group.kernel_ns for group in found)
    return [
        components.build_quiet(format_count_line(len(found), len(table.groups), time, table)),
        components.build_table(columns, rows, f"Ops by {table.sorting}, page {number} of {pages}"),
        *components.build_pager(view, number, pages),
        *(components.build_quiet(f"{line}.") for line in labels.format_op_legend(report.ops)),
    ]


def _is_wanted(group: OpGroup, view: View) -> bool:
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
