"""Two recordings side by side: what became faster, slower, new, gone, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import components
from gpudiag_dashboard.components import Child, View, build_link, build_section, clean_text
from gpudiag_dashboard.library import Library, RecentCache
from gpudiag_dashboard.page import ContentPage
from gpudiag_dashboard.pages.bundles import Listed

from gpudiag.comparison.recordings import compare
from gpudiag.model.comparison import Change, OpChange, StepComparison
from gpudiag.report import causes, comparison
from gpudiag.report.blocks import Cell, Column, Table, build_row

ON_A_PAGE = 50

_CHANGES: tuple[Change, ...] = ("slower", "faster", "new", "gone", "not_known", "unchanged")
"""How an op can have changed, in the order in which they are offered."""
_comparisons: RecentCache[StepComparison] = RecentCache(8)


class Compare(ContentPage):
    """The comparison of `bundle` (A) with `other` (B). Query: change (only ops that changed so), sheet."""

    path, title = "/compare", "Compare"

    def content(self, view: View, library: Library) -> list[Child]:
        """Return the comparison, or the choice of what to compare with."""
        if view.other is None:
            title = html.H1("Compare with")
            rows = tuple(
                build_row(
                    Cell(entry.name, link=("href", view.href(other=entry.name))),
                    Listed(entry, library.digest(entry, load=False), waiting=False).device or "known when it is opened",
                    components.format_moment(entry.created_unix_ns),
                )
                for entry in library.bundles()
                if entry.name != view.bundle and entry.status != "unreadable" and entry.kind != "experiments"
            )
            if not rows:
                do = "Record the run again after a change, into the same folder."
                return [title, components.build_empty("There is no other recording here", do)]
            columns = (Column("recording"), Column("device"), Column("recorded"))
            return [title, components.build_table(Table(columns, rows, "Recordings to compare with"), view)]
        a, b = library.opened(view.bundle or "", view.rank), library.opened(view.other)
        key = (id(a.report), id(b.report))
        # Paging asks for it again. The names of the recordings stand in place of their paths
        compared = _comparisons.get(key, lambda: compare(a, b).data, a.report, b.report)
        named = ((compared.a, view.bundle), (compared.b, view.other))
        side_a, side_b = (msgspec.structs.replace(side, path=name or "") for side, name in named)
        compared = msgspec.structs.replace(compared, a=side_a, b=side_b)
        meaning, unlike = comparison.format_interval_meaning(compared), causes.format_unlike(compared)
        same = causes.format_nothing_set(compared)
        warnings = [html.Li(clean_text(warning)) for warning in compared.warnings]
        swap = build_link("Swap A and B", View(view.page, view.other, view.bundle).href())
        another = build_link("Another B", view.bare.href(other=None))
        return [
            html.H1(f"{components.clean_long_text(comparison.format_comparison_headline(compared))}."),
            components.build_quiet(meaning) if meaning else None,
            html.P(html.Strong(unlike)) if unlike else None,
            html.P(same) if same else None,
            html.Ul(warnings, className="warnings") if warnings else None,
            *build_section(causes.build_causes_section(compared), view),
            *build_section(comparison.build_runs_section(compared), view),
            html.Div([swap, another], className="links"),
            *build_section(comparison.build_parts_section(compared), view),
            *build_section(comparison.build_findings_section(compared), view),
            html.H2("Ops"),
            *_build_ops(compared.ops, view),
        ]


def _build_ops(ops: Sequence[OpChange], view: View) -> list[Component]:
    counts = {change: sum(op.change == change for op in ops) for change in _CHANGES}
    asked = next((change for change in _CHANGES if change == view.query.get("change")), None)
    links = [("all", view.href(change=None, sheet=None), asked is None)]
    for change, word in ((change, comparison.MARKS[change]) for change in _CHANGES):
        if counts[change]:
            links.append((f"{word} ({counts[change]:,})", view.href(change=change, sheet=None), asked == change))
    choice = components.build_choices("Change", links)
    chosen = [op for op in ops if asked in (None, op.change)]
    if not chosen:
        return [choice, components.build_quiet("No op did.")]
    shown, number, pages = components.choose_page(view, chosen, ON_A_PAGE)
    table = comparison.build_changes_table(shown)
    rows = []
    for op, row in zip(shown, table.rows, strict=True):  # an op that is new leads to the recording that has it
        side = view if op.a_ns is not None else View(view.page, view.other, view.bundle)
        name = msgspec.structs.replace(row.cells[0], link=("href", side.href("/ops", op=op.name)))
        rows.append(msgspec.structs.replace(row, cells=(name, *row.cells[1:])))
    table = msgspec.structs.replace(table, rows=tuple(rows), caption="Ops in both recordings, the largest difference first")
    return [choice, components.build_table(table, view), *components.build_pager(view, number, pages)]


PAGE = Compare()
