"""The ops of a recording: sorted, filtered, grouped and paged on the server."""

from __future__ import annotations

from operator import attrgetter

import dash
import msgspec
from dash import Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import View, build_choices, build_empty, build_link, clean_text
from gpudiag_dashboard.library import Library, RecentCache
from gpudiag_dashboard.page import ADDRESS, ContentPage, build_filter, follow_filter

from gpudiag.errors import GpudiagError
from gpudiag.model.ops import BOUNDS
from gpudiag.model.report import ReportData
from gpudiag.report import labels
from gpudiag.report.blocks import Table
from gpudiag.report.module_tree import ModuleNode, build_module_table, build_module_tree
from gpudiag.report.op_table import Grouping, OpGroup, OpTable, Sorting, build_group_table, build_op_table, encode_op_table_csv
from gpudiag.report_data import list_module_ops
from gpudiag.units import format_ns, format_share

ON_A_PAGE = 50
GROUPINGS: tuple[Grouping, ...] = ("op", "signature", "module", "phase", "kernel")
SORTINGS: tuple[Sorting, ...] = ("time", "calls", "flops", "bytes", "efficiency", "ai")
UNFOLDED, MOST_SHOWN = 2, 150
"""Levels of the tree of modules below the first that are shown at first, and rows of it: each is some twenty components of Dash, whose
work grows with their square (4,000 took a browser minutes)."""

SHAPES = {"op": "op", "signature": "op and shapes", "module": "module", "phase": "phase", "kernel": "kernel"}

FIND, SAVE = "ops-find", "ops-save"

_LONGEST = 200
_NO_OPS = "Record with shapes: gpudiag.profile does, and torch.profiler with record_shapes=True."
_SORTED_BY: dict[str, Sorting] = {"calls": "calls", "time": "time", "of roofline": "efficiency", "FLOP/B": "ai"}
"""Title of a column -> what a click on it sorts by; rates by the amount of work or traffic."""

_get_texts = attrgetter("name", "op", "signature", "module", "phase", "bound", "engine", "provenance", "kernel_class")
_tables: RecentCache[OpTable] = RecentCache(32)
_by_module: RecentCache[ReportData] = RecentCache(4)


class Ops(ContentPage):
    """The table of ops. Query: group, sort, bound, phase, op (one op alone, by its shapes), find (text in a line), sheet."""

    path, title = "/ops", "Ops"

    def layout(self, view: View) -> Component:
        """Return the text filter, which stays while the table is made anew, and the place of the table."""
        save = html.Button("Save as CSV", id=SAVE, type="button", title="the rows that the filters leave, with plain numbers")
        return html.Div(
            [
                html.H1("Ops"),
                html.Div([build_filter(FIND, view), save], className="tools"),
                dcc.Download(id="ops-file"),
                super().layout(view),
            ]
        )

    def register(self, app: dash.Dash, library: Library) -> None:
        """Register the table, and the filter that changes the address."""
        super().register(app, library)

        follow_filter(app, self.path, FIND)

        @app.callback(Output(FIND, "value"), Input(ADDRESS, "search"), State(ADDRESS, "pathname"), State(FIND, "value"))
        def went_back(search: str | None, pathname: str | None, text: str | None) -> object:
            view = View.parse(pathname, search)
            known = view.query.get("find", "")
            return no_update if view.page != self.path or (text or "") == known else known

        @app.callback(
            Output("ops-file", "data"), Input(SAVE, "n_clicks"), State(ADDRESS, "pathname"), State(ADDRESS, "search"),
            prevent_initial_call=True,
        )  # fmt: skip
        def saved(clicks: int | None, pathname: str | None, search: str | None) -> object:
            view = View.parse(pathname, search)
            if not clicks or view.page != self.path or view.bundle is None:
                return no_update
            report = _choose_rows(view, library, library.report(view.bundle, view.rank).data)
            table = _find_table(view, report)
            text = encode_op_table_csv(msgspec.structs.replace(table, groups=tuple(_select_groups(table, view))))
            name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in view.bundle)[-80:]
            return {"content": text, "filename": f"{name}-{table.grouping}.csv", "type": "text/csv"}

    def content(self, view: View, library: Library) -> list[Component]:
        """Return the choices and the page of the table that they lead to."""
        report = library.report(view.bundle or "", view.rank).data
        if not report.ops and not report.kernels:
            return [build_empty("No ops were recorded", _NO_OPS)]
        grouping = _find_grouping(view)
        chosen = [*_build_choices(view, report, grouping), *_build_op_summary(view, report)]
        try:
            report = _choose_rows(view, library, report)
            table = _find_table(view, report)
            return [*chosen, *(_build_tree(view, report) if grouping == "module" else _build_page(table, view, report))]
        except GpudiagError as error:
            return [*chosen, components.build_error(error.message, error.hint or "")]


def _choose_rows(view: View, library: Library, report: ReportData) -> ReportData:
    """Return the report with the op rows that the grouping needs: of modules they are told apart when somebody asks."""
    if _find_grouping(view) != "module":
        return report

    def tell_apart() -> ReportData:
        return msgspec.structs.replace(report, ops=list_module_ops(library.opened(view.bundle or "", view.rank).analysis))

    return _by_module.get(id(report), tell_apart, report)


def _find_grouping(view: View) -> Grouping:
    """Return what one line sums up: what the query says, else shapes where one op is looked at, else ops."""
    first: Grouping = "signature" if "op" in view.query else "op"
    return next((name for name in GROUPINGS if name == view.query.get("group")), first)


def _find_sorting(view: View) -> Sorting:
    return next((name for name in SORTINGS if name == view.query.get("sort")), "time")


def _find_table(view: View, report: ReportData) -> OpTable:
    """Return the table that the query asks for, before the filters for one op and for text. Raises GpudiagError."""
    grouping, sort, phase = _find_grouping(view), _find_sorting(view), view.query.get("phase")
    bound = next((name for name in BOUNDS if name == view.query.get("bound")), None)
    # paging and filtering ask for the same table again
    return _tables.get(
        (id(report), grouping, sort, phase, bound),
        lambda: build_op_table(report, grouping=grouping, sorting=sort, phase=phase, bound=bound),
        report,
    )


def _build_tree(view: View, report: ReportData) -> list[Component]:
    bound = next((name for name in BOUNDS if name == view.query.get("bound")), None)
    sort, find = _find_sorting(view), view.query.get("find", "").strip()
    nodes = build_module_tree(report, sorting=sort, phase=view.query.get("phase"), bound=bound, find=find)
    if not nodes:
        return [build_empty("No row matches", "Remove a filter.", build_link("All ops", view.bare.href()))]
    within = view.query.get("within", "")
    shown = [node for node in nodes if find or node.depth <= UNFOLDED or f"{within}.".startswith(f"{_find_parent(node)}.")][:MOST_SHOWN]
    made = build_module_table(shown, sort, report)
    unfold = [_unfold(node, within, view) if not find else ("", True) for node in shown]
    said = f"{len(nodes):,} {labels.pluralize(len(nodes), 'module')}, each with all that stands within it."
    if find and len(nodes) > MOST_SHOWN:
        said += f" The first {MOST_SHOWN} are shown: filter by more of a name."
    table = components.build_table(made, view, sorts=_list_sorts(made, view, "module", sort), whole=True, unfold=unfold)
    return [components.build_quiet(said), table, *(components.build_quiet(f"{line}.") for line in labels.format_op_legend(report.ops))]


def _find_parent(node: ModuleNode) -> str:
    return node.group.name.rpartition(".")[0]


def _unfold(node: ModuleNode, within: str, view: View) -> tuple[str, bool]:
    """Return the address with or without the parts of a module ('' where they always stand there, or it has none), and which of both."""
    if not node.opens or node.depth < UNFOLDED:
        return "", True
    name = node.group.name
    shown = f"{within}.".startswith(f"{name}.")
    return view.href(within=_find_parent(node) if shown else name), shown


def _build_choices(view: View, report: ReportData, grouping: Grouping) -> list[Component]:
    groups = [(SHAPES[name], view.href(group=name, sheet=None, sort=None), name == grouping) for name in GROUPINGS]
    rows = [build_choices("Group by", groups)]
    recorded = {row.bound for row in report.ops}
    bounds = [(name, view.href(bound=name, sheet=None), name == view.query.get("bound")) for name in BOUNDS if name in recorded]
    if bounds:
        rows.append(build_choices("Bound", [("all", view.href(bound=None, sheet=None), "bound" not in view.query), *bounds]))
    phases = sorted({row.phase for row in report.ops if row.phase})
    if phases and grouping != "kernel":
        links = [(name, view.href(phase=name, sheet=None), name == view.query.get("phase")) for name in phases]
        rows.append(build_choices("Phase", [("all", view.href(phase=None, sheet=None), "phase" not in view.query), *links]))
    return rows


def _build_op_summary(view: View, report: ReportData) -> list[Component]:
    name = view.query.get("op")
    if name is None:
        return []
    shown = clean_text(name, 160)
    rows = sorted((row for row in report.ops if row.name == name), key=lambda row: -row.kernel_ns)
    every = build_link("All ops", view.href(op=None, sheet=None, group=None))
    if not rows:
        return [components.build_error(f"no op of this recording is named {shown!r}"), every]
    time, total = labels.sum_op_ns(rows), labels.sum_op_ns(report.ops)
    share = f", {format_share(time / total, 1)} of the time of all ops" if total else ""
    figures = f" {sum(row.count for row in rows):,} calls, {format_ns(time)}{share}"
    sites = dict.fromkeys(clean_text(labels.format_site(row.where), _LONGEST) for row in rows if row.where)
    items = [html.Li(html.Code(site)) for site in list(sites)[:5]]
    links = [
        build_link("On the timeline", view.href("/timeline", op=name)),
        build_link("On the roofline", view.href("/roofline", op=name)),
        every,
    ]
    return [
        html.H2([html.Code(shown), html.Span(figures, className="quiet")]),
        *([html.P("Call sites:"), html.Ul(items)] if items else []),
        html.Div(links, className="links"),
    ]


def _select_groups(table: OpTable, view: View) -> list[OpGroup]:
    """Return the lines of a table that the query leaves: of one op, with a text in any column."""
    op, text = view.query.get("op"), view.query.get("find", "").strip().lower()
    groups = [group for group in table.groups if op is None or group.op == op]
    return [group for group in groups if any(text in part.lower() for part in _get_texts(group) if part)] if text else groups


def _build_page(table: OpTable, view: View, report: ReportData) -> list[Component]:
    groups = _select_groups(table, view)
    if not groups:
        return [build_empty("No row matches", "Remove a filter.", build_link("All ops", view.bare.href()))]
    every, time = len(table.groups), sum(group.kernel_ns for group in groups)
    lines = f"{len(groups):,} row{'' if len(groups) == 1 else 's'}" if len(groups) == every else f"{len(groups):,} of {every:,} rows"
    share = f", {format_share(time / table.total_ns, 1)} of all" if table.total_ns else ""
    cut = f"; the report keeps the {table.cut:,} largest kernels" if table.cut else ""
    shown, number, pages = components.choose_page(view, groups, ON_A_PAGE)
    made = build_group_table(table, shown, report if report.ops else None)
    made = msgspec.structs.replace(made, caption=f"Ops by {table.sorting}, page {number} of {pages}")
    return [
        components.build_quiet(f"{lines}: {format_ns(time)}{share}{cut}"),
        components.build_table(made, view, sorts=_list_sorts(made, view, table.grouping, table.sorting), whole=True),
        *components.build_pager(view, number, pages),
        *(components.build_quiet(f"{line}.") for line in labels.format_op_legend(report.ops)),
    ]


def _list_sorts(made: Table, view: View, grouping: Grouping, sorting: Sorting) -> dict[str, tuple[str, str]]:
    sorts = {}
    for column in made.columns:
        by: Sorting | None = "flops" if column.title.endswith("FLOP/s") else "bytes" if column.title.endswith("B/s") else None
        by = by or _SORTED_BY.get(column.title)
        if by is not None and (grouping != "kernel" or by in ("calls", "time")):
            direction = "ascending" if by == "efficiency" else "descending"
            sorts[column.title] = (view.href(sort=None if by == "time" else by, sheet=None), direction if by == sorting else "")
    return sorts


PAGE = Ops()
