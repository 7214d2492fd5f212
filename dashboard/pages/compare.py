"""Two recordings side by side: what became faster, slower, new, gone, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import Cell, Child, Column, View, build_link, clean_text
from gpudiag_dashboard.library import Library, RecentCache
from gpudiag_dashboard.page import ContentPage

from gpudiag.comparison.recordings import compare_recordings
from gpudiag.model.comparison import Change, OpChange, StepComparison
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

ON_A_PAGE = 50

_NOT_THERE = "-"
_OP_COLUMNS = (
    Column("op"),
    Column("change"),
    Column("A", True, "kernel time a step, and its standard deviation from step to step"),
    Column("B", True, "kernel time a step, and its standard deviation from step to step"),
    Column("difference", True, "B less A, a step, with its interval"),
    Column("calls a step", True, "in A, in B"),
)
_comparisons: RecentCache[StepComparison] = RecentCache(8)


class Compare(ContentPage):
    """The comparison of `bundle` (A) with `other` (B). Query: change (only ops that changed so), sheet."""

    path, title = "/compare", "Compare"

    def content(self, view: View, library: Library) -> list[Child]:
        """Return the comparison, or the choice of what to compare with."""
        if view.other is None:
            title = html.H1("Compare with")
            rows = [
                [
                    Cell(clean_text(entry.name, 200), href=view.href(other=entry.name)),
                    clean_text(entry.device, 80) if entry.device else "known when it is opened",
                    components.format_moment(entry.created_unix_ns),
                ]
                for entry in library.bundles()
                if entry.name != view.bundle and entry.status != "unreadable"
            ]
            if not rows:
                do = "Record the run again after a change, into the same folder."
                return [title, components.build_empty("There is no other recording here", do)]
            columns = [Column("recording"), Column("device"), Column("recorded")]
            return [title, components.build_table(columns, rows, "Recordings to compare with")]
        a, b = library.opened(view.bundle or "", view.rank), library.opened(view.other)
        key = (id(a.report), id(b.report))
        # Paging asks for it again. The names of the recordings stand in place of their paths
        compared = _comparisons.get(key, lambda: compare_recordings(a, b).data, a.report, b.report)
        named = ((compared.a, view.bundle), (compared.b, view.other))
        side_a, side_b = (msgspec.structs.replace(side, path=name or "") for side, name in named)
        compared = msgspec.structs.replace(compared, a=side_a, b=side_b)
        meaning = comparison.format_interval_meaning(compared)
        warnings = [html.Li(clean_text(warning)) for warning in compared.warnings]
        swap = build_link("Swap A and B", View(view.page, view.other, view.bundle).href())
        another = build_link("Another B", view.bare.href(other=None))
        return [
            html.H1(f"{components.clean_long_text(comparison.format_comparison_headline(compared))}."),
            components.build_quiet(meaning) if meaning else None,
            html.Ul(warnings, className="warnings") if warnings else None,
            *build_comparison_part(comparison.build_runs_table(compared)),
            html.Div([swap, another], className="links"),
            *build_comparison_part(comparison.build_parts_table(compared)),
            *build_comparison_part(comparison.build_findings_table(compared)),
            html.H2("Ops"),
            *_build_ops(compared.ops, view),
        ]


def build_comparison_part(table: comparison.ComparisonTable) -> list[Component]:
    """Return one part of the comparison with its title and notes; nothing where it has no rows."""
    if not table.rows:
        return []
    columns = [Column(title, side == "r") for title, side in table.columns]
    details = table.details or ("",) * len(table.rows)
    rows = [
        [Cell(clean_text(cell.text), (clean_text(detail, 300),) if detail and index == 0 else ()) for index, cell in enumerate(row)]
        for row, detail in zip(table.rows, details, strict=True)
    ]
    return [
        html.H2(table.title),
        components.build_table(columns, rows, table.title),
        *(components.build_quiet(f"{note}.") for note in table.notes),
    ]


def _build_ops(ops: Sequence[OpChange], view: View) -> list[Component]:
    counts = {change: sum(op.change == change for op in ops) for change in CHANGE_WORDS}
    asked = next((change for change in CHANGE_WORDS if change == view.query.get("change")), None)
    links = [("all", view.href(change=None, sheet=None), asked is None)]
    for change, word in CHANGE_WORDS.items():
        if counts[change]:
            links.append((f"{word} ({counts[change]:,})", view.href(change=change, sheet=None), asked == change))
    choice = components.build_choices("Change", links)
    chosen = [op for op in ops if asked in (None, op.change)]
    if not chosen:
        return [choice, components.build_quiet("No op did.")]
    shown, number, pages = components.choose_page(view, chosen, ON_A_PAGE)
    rows = []
    for op in shown:
        shapes = dict.fromkeys(text for text in (op.signature_a, op.signature_b) if text)
        details = tuple(clean_text(text, 300) for text in (op.module, op.phase, " -> ".join(shapes)) if text)
        side = view if op.a_ns is not None else View(view.page, view.other, view.bundle)
        interval: tuple[str, ...] = ()
        if op.low_ns is not None and op.high_ns is not None:
            interval = (f"{format_change_ns(op.low_ns)} to {format_change_ns(op.high_ns)}",)
        calls = ", ".join(_NOT_THERE if count is None else f"{count:,.4g}" for count in (op.a_calls, op.b_calls))
        rows.append(
            [
                Cell(clean_text(op.name, 160), details, side.href("/ops", op=op.name)),
                Cell(CHANGE_WORDS[op.change]),
                _build_time_cell(op.a_ns, op.a_spread_ns),
                _build_time_cell(op.b_ns, op.b_spread_ns),
                Cell(format_change_ns(op.delta_ns), interval),
                Cell(calls),
            ]
        )
    table = components.build_table(_OP_COLUMNS, rows, "Ops in both recordings, the largest difference first")
    return [choice, table, *components.build_pager(view, number, pages)]


def _build_time_cell(ns: float | None, spread_ns: float | None) -> Cell:
    if ns is None:
        return Cell(_NOT_THERE)
    return Cell(format_ns(ns), (f"\u00b1 {format_ns(spread_ns)}" if spread_ns is not None else "variance unknown",))


PAGE = Compare()
