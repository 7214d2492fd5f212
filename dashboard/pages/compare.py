"""Two recordings side by side: what became faster, slower, new, gone, and how sure that is."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import comparecells, parts
from gpudiag_dashboard.comparecells import CHANGES
from gpudiag_dashboard.content import ContentPage
from gpudiag_dashboard.library import Library
from gpudiag_dashboard.view import View

from gpudiag.api.compare import Comparison, compare
from gpudiag.api.opened import Opened
from gpudiag.model.compare import OpChange, StepComparison
from gpudiag.model.report import ReportData
from gpudiag.report import compare_words

ON_A_PAGE = 50

_MOST = 8
_lock = threading.Lock()
_found: OrderedDict[tuple[int, int], tuple[ReportData, ReportData, Comparison]] = OrderedDict()


class Compare(ContentPage):
    """The comparison of `bundle` (A) with `other` (B). Query: change (only ops that changed so), sheet."""

    path, title = "/compare", "Compare"

    def content(self, view: View, library: Library) -> list[Component]:
        """Return the comparison, or the choice of what to compare with."""
        if view.other is None:
            return _choice(view, library)
        found = _named(_compared(library.opened(view.bundle or "", view.rank), library.opened(view.other)).data, view)
        return [
            html.H1(f"{parts.prose(compare_words.headline(found))}."),
            *([parts.quiet(compare_words.meaning(found))] if compare_words.meaning(found) else []),
            *_warnings(found.warnings),
            *comparecells.told(compare_words.runs(found)),
            _links(view),
            *comparecells.told(compare_words.parts(found)),
            *comparecells.told(compare_words.findings(found)),
            html.H2("Ops"),
            *_ops(found.ops, view),
        ]


def _named(found: StepComparison, view: View) -> StepComparison:
    """Return the comparison with the names of the recordings in place of their paths."""
    a, b = (msgspec.structs.replace(side, path=name or "") for side, name in ((found.a, view.bundle), (found.b, view.other)))
    return msgspec.structs.replace(found, a=a, b=b)


def _compared(a: Opened, b: Opened) -> Comparison:
    """Return the comparison; kept, since paging asks for it again."""
    key = (id(a.report), id(b.report))
    with _lock:
        known = _found.get(key)
        if known is None or known[0] is not a.report or known[1] is not b.report:
            known = _found[key] = (a.report, b.report, compare(a, b))  # their tables are not held
        _found.move_to_end(key)
        while len(_found) > _MOST:
            _found.popitem(last=False)
        return known[2]


def _choice(view: View, library: Library) -> list[Component]:
    """Return the recordings that this one can be compared with."""
    others = [entry for entry in library.bundles() if entry.name != view.bundle and entry.status != "unreadable"]
    title = html.H1("Compare with")
    if not others:
        return [title, parts.empty("There is no other recording here", "Record the run again after a change, into the same folder.")]
    columns = [parts.Column("recording"), parts.Column("device"), parts.Column("recorded")]
    rows = [
        [
            parts.Cell(parts.text(entry.name, 200), href=view.href(other=entry.name)),
            parts.text(entry.device, 80) if entry.device else "known when it is opened",
            parts.moment(entry.created_unix_ns),
        ]
        for entry in others
    ]
    return [title, parts.table(columns, rows, "Recordings to compare with")]


def _links(view: View) -> Component:
    """Return how to turn the two around, or to take another one."""
    swapped, another = View(view.page, view.other, view.bundle).href(), view.bare.href(other=None)
    return html.Div([parts.link("Swap A and B", swapped), parts.link("Another B", another)], className="links")


def _warnings(warnings: Sequence[str]) -> list[Component]:
    return [html.Ul([html.Li(parts.text(warning)) for warning in warnings], className="warnings")] if warnings else []


def _ops(ops: Sequence[OpChange], view: View) -> list[Component]:
    """Return one page of the ops that changed as the query asks."""
    counts = {change: sum(op.change == change for op in ops) for change in CHANGES}
    asked = next((change for change in CHANGES if change == view.query.get("change")), None)
    links = [("all", view.href(change=None, sheet=None), asked is None)]
    links += [
        (f"{said} ({counts[change]:,})", view.href(change=change, sheet=None), asked == change)
        for change, said in CHANGES.items()
        if counts[change]
    ]
    chosen = [op for op in ops if asked in (None, op.change)]
    if not chosen:
        return [parts.choice("Change", links), parts.quiet("No op did.")]
    pages = -(-len(chosen) // ON_A_PAGE)
    number = min(max(view.number("sheet") or 1, 1), pages)
    shown = chosen[(number - 1) * ON_A_PAGE : number * ON_A_PAGE]
    return [parts.choice("Change", links), comparecells.ops(shown, view), *parts.pager(view, number, pages)]


PAGE = Compare()
