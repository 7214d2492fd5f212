"""The parts of a comparison as tables; the words are those of `gpudiag compare`."""

from __future__ import annotations

from collections.abc import Sequence

from dash import html
from dash.development.base_component import Component
from gpudiag_dashboard import parts
from gpudiag_dashboard.view import View

from gpudiag.model.compare import Change, OpChange
from gpudiag.report import compare_words
from gpudiag.report.compare_words import change_ns
from gpudiag.units import format_ns

CHANGES: dict[Change, str] = {
    "slower": "slower",
    "faster": "faster",
    "new": "new",
    "gone": "gone",
    "not_known": "variance not known",
    "unchanged": "within noise",
}
"""How an op changed -> as it is said, in the order in which they are offered."""

_NOT_THERE = "-"


def told(table: compare_words.Table) -> list[Component]:
    """Return one part of the comparison with its title and notes; nothing where it has no rows."""
    if not table.rows:
        return []
    columns = [parts.Column(title, side == "r") for title, side in table.columns]
    details = table.details or ("",) * len(table.rows)
    rows = [
        [parts.Cell(parts.text(cell.text), (parts.text(detail, 300),) if detail and index == 0 else ()) for index, cell in enumerate(row)]
        for row, detail in zip(table.rows, details, strict=True)
    ]
    return [html.H2(table.title), parts.table(columns, rows, table.title), *(parts.quiet(f"{note}.") for note in table.notes)]


def ops(shown: Sequence[OpChange], view: View) -> Component:
    """Return the lines of ops."""
    columns = [
        parts.Column("op"),
        parts.Column("change"),
        parts.Column("A", True, "kernel time a step, and its standard deviation from step to step"),
        parts.Column("B", True, "kernel time a step, and its standard deviation from step to step"),
        parts.Column("difference", True, "B less A, a step, with its interval"),
        parts.Column("calls a step", True, "in A, in B"),
    ]
    return parts.table(columns, [_op(op, view) for op in shown], "Ops in both recordings, the largest difference first")


def _op(op: OpChange, view: View) -> list[parts.Cell]:
    shapes = dict.fromkeys(text for text in (op.signature_a, op.signature_b) if text)
    details = [text for text in (op.module, op.phase, " -> ".join(shapes)) if text]
    side = view if op.a_ns is not None else View(view.page, view.other, view.bundle)
    interval = (f"{change_ns(op.low_ns)} to {change_ns(op.high_ns)}",) if op.low_ns is not None and op.high_ns is not None else ()
    return [
        parts.Cell(parts.text(op.name, 160), tuple(parts.text(text, 300) for text in details), side.href("/ops", op=op.name)),
        parts.Cell(CHANGES[op.change]),
        parts.Cell(*_time(op.a_ns, op.a_spread_ns)),
        parts.Cell(*_time(op.b_ns, op.b_spread_ns)),
        parts.Cell(change_ns(op.delta_ns), interval),
        parts.Cell(f"{_calls(op.a_calls)}, {_calls(op.b_calls)}"),
    ]


def _time(ns: float | None, spread_ns: float | None) -> tuple[str, tuple[str, ...]]:
    if ns is None:
        return _NOT_THERE, ()
    return format_ns(ns), (f"± {format_ns(spread_ns)}" if spread_ns is not None else "variance not known",)


def _calls(count: float | None) -> str:
    return _NOT_THERE if count is None else f"{count:,.4g}"
