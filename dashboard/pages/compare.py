"""Two recordings side by side: what became faster, slower, new, gone, and how sure that is."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import View
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.page import ContentPage

from gpudiag.api.comparison import Comparison, compare_recordings
from gpudiag.api.pipeline import AnalysedRecording
from gpudiag.model.comparison import Change, OpChange, StepComparison
from gpudiag.model.report import ReportData
from gpudiag.report import comparison
from gpudiag.report.comparison import format_change_ns
from gpudiag.units import format_ns

CHANGE_WORDS: dict[Change, str] = {
    "slower": "slower",
    "faster": "faster",
    "new": "new",
    "gone": "gone",
    "not_known": "variance unknown",
    "unchanged": "within noise",
}
"""How an op changed -> as it is said, in the order in which they are offered."""

_NOT_THERE = "-"


def build_comparison_part(table: comparison.ComparisonTable) -> list[Component]:
    """Return one part of the comparison with its title and notes; nothing where it has no rows."""
    if not table.rows:
        return []
    columns = [components.Column(title, side == "r") for title, side in table.columns]
    details = table.details or ("",) * len(table.rows)
    rows = [
        [
            components.Cell(components.clean_text(cell.text), (components.clean_text(detail, 300),) if detail and index == 0 else ())
            for index, cell in enumerate(row)
        ]
        for row, detail in zip(table.rows, details, strict=True)
    ]
    return [
        html.H2(table.title),
        components.build_table(columns, rows, table.title),
        *(components.build_quiet(f"{note}.") for note in table.notes),
    ]


def build_op_rows(shown: Sequence[OpChange], view: View) -> Component:
    """Return the lines of ops."""
    columns = [
        components.Column("op"),
        components.Column("change"),
        components.Column("A", True, "kernel time a step, and its standard deviation from step to step"),
        components.Column("B", True, "kernel time a step, and its standard deviation from step to step"),
        components.Column("difference", True, "B less A, a step, with its interval"),
        components.Column("calls a step", True, "in A, in B"),
    ]
    return components.build_table(
        columns, [_build_op_cells(op, view) for op in shown], "Ops in both recordings, the largest difference first"
    )


def _build_op_cells(op: OpChange, view: View) -> list[components.Cell]:
    shapes = dict.fromkeys(text for text in (op.signature_a, op.signature_b) if text)
    details = [text for text in (op.module, op.phase, " -> ".join(shapes)) if text]
    side = view if op.a_ns is not None else View(view.page, view.other, view.bundle)
    interval = (
        (f"{format_change_ns(op.low_ns)} to {format_change_ns(op.high_ns)}",) if op.low_ns is not None and op.high_ns is not None else ()
    )
    return [
        components.Cell(
            components.clean_text(op.name, 160), tuple(components.clean_text(text, 300) for text in details), side.href("/ops", op=op.name)
        ),
        components.Cell(CHANGE_WORDS[op.change]),
        components.Cell(*_format_time(op.a_ns, op.a_spread_ns)),
        components.Cell(*_format_time(op.b_ns, op.b_spread_ns)),
        components.Cell(format_change_ns(op.delta_ns), interval),
        components.Cell(f"{_format_calls(op.a_calls)}, {_format_calls(op.b_calls)}"),
    ]


def _format_time(ns: float | None, spread_ns: float | None) -> tuple[str, tuple[str, ...]]:
    if ns is None:
        return _NOT_THERE, ()
    return format_ns(ns), (f"± {format_ns(spread_ns)}" if spread_ns is not None else "variance unknown",)


def _format_calls(count: float | None) -> str:
    return _NOT_THERE if count is None else f"{count:,.4g}"


ON_A_PAGE = 50

_MOST = 8
_lock = threading.Lock()
_comparisons: OrderedDict[tuple[int, int], tuple[ReportData, ReportData, Comparison]] = OrderedDict()


class Compare(ContentPage):
    """The comparison of `bundle` (A) with `other` (B). Query: change (only ops that changed so), sheet."""

    path, title = "/compare", "Compare"

    def content(self, view: View, library: Library) -> list[Component]:
        """Return the comparison, or the choice of what to compare with."""
        if view.other is None:
            # The recordings that this one can be compared with
            others = [entry for entry in library.bundles() if entry.name != view.bundle and entry.status != "unreadable"]
            title = html.H1("Compare with")
            if not others:
                return [
                    title,
                    components.build_empty(
                        "There is no other recording here", "Record the run again after a change, into the same folder."
                    ),
                ]
            columns = [components.Column("recording"), components.Column("device"), components.Column("recorded")]
            rows = [
                [
                    components.Cell(components.clean_text(entry.name, 200), href=view.href(other=entry.name)),
                    components.clean_text(entry.device, 80) if entry.device else "known when it is opened",
                    components.format_moment(entry.created_unix_ns),
                ]
                for entry in others
            ]
            return [title, components.build_table(columns, rows, "Recordings to compare with")]
        found = _name_sides(_compare_recordings(library.opened(view.bundle or "", view.rank), library.opened(view.other)).data, view)
        return [
            html.H1(f"{components.clean_long_text(comparison.format_comparison_headline(found))}."),
            *([components.build_quiet(comparison.format_interval_meaning(found))] if comparison.format_interval_meaning(found) else []),
            *_build_warnings(found.warnings),
            *build_comparison_part(comparison.build_runs_table(found)),
            _build_links(view),
            *build_comparison_part(comparison.build_parts_table(found)),
            *build_comparison_part(comparison.build_findings_table(found)),
            html.H2("Ops"),
            *_build_ops(found.ops, view),
        ]


def _name_sides(found: StepComparison, view: View) -> StepComparison:
    """Return the comparison with the names of the recordings in place of their paths."""
    a, b = (msgspec.structs.replace(side, path=name or "") for side, name in ((found.a, view.bundle), (found.b, view.other)))
    return msgspec.structs.replace(found, a=a, b=b)


def _compare_recordings(a: AnalysedRecording, b: AnalysedRecording) -> Comparison:
    """Return the comparison; kept, since paging asks for it again."""
    key = (id(a.report), id(b.report))
    with _lock:
        known = _comparisons.get(key)
        if known is None or known[0] is not a.report or known[1] is not b.report:
            known = _comparisons[key] = (a.report, b.report, compare_recordings(a, b))  # their tables are not held
        _comparisons.move_to_end(key)
        while len(_comparisons) > _MOST:
            _comparisons.popitem(last=False)
        return known[2]


def _build_links(view: View) -> Component:
    """Return how to turn the two around, or to take another one."""
    swapped, another = View(view.page, view.other, view.bundle).href(), view.bare.href(other=None)
    return html.Div([components.build_link("Swap A and B", swapped), components.build_link("Another B", another)], className="links")


def _build_warnings(warnings: Sequence[str]) -> list[Component]:
    return [html.Ul([html.Li(components.clean_text(warning)) for warning in warnings], className="warnings")] if warnings else []


def _build_ops(ops: Sequence[OpChange], view: View) -> list[Component]:
    """Return one page of the ops that changed as the query asks."""
    counts = {change: sum(op.change == change for op in ops) for change in CHANGE_WORDS}
    asked = next((change for change in CHANGE_WORDS if change == view.query.get("change")), None)
    links = [("all", view.href(change=None, sheet=None), asked is None)]
    links += [
        (f"{said} ({counts[change]:,})", view.href(change=change, sheet=None), asked == change)
        for change, said in CHANGE_WORDS.items()
        if counts[change]
    ]
    chosen = [op for op in ops if asked in (None, op.change)]
    if not chosen:
        return [components.build_choice("Change", links), components.build_quiet("No op did.")]
    pages = -(-len(chosen) // ON_A_PAGE)
    number = min(max(view.number("sheet") or 1, 1), pages)
    shown = chosen[(number - 1) * ON_A_PAGE : number * ON_A_PAGE]
    return [components.build_choice("Change", links), build_op_rows(shown, view), *components.build_pager(view, number, pages)]


PAGE = Compare()
