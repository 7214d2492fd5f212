"""The ops that cost most, for a terminal: figures as the width allows, and what tells ops of one name apart below or beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpudiag.model.report import OpRow, ReportData
from gpudiag.report import words
from gpudiag.report.console import QUIET, cells, fitting, heading, line, new_table, print_with_details
from gpudiag.report.escape import clean, middle
from gpudiag.report.labels import namer, op_detail, phase_text
from gpudiag.units import format_ns, format_share

if TYPE_CHECKING:
    from rich.console import Console

_BESIDE = 150
"""Columns from which call site and shapes stand beside the figures: an op then takes one line."""
_LONGEST_BESIDE = 0.4
"""Share of the room for name and details that the name takes at most, where both stand in one line."""
_LONGEST_DETAIL = 400
_INDENT = 2
"""Of a detail below its op."""


def section(console: Console, report: ReportData, top: int, width: int) -> None:
    """Print the `top` ops by time, `width` columns wide; nothing where there is none."""
    rows = sorted(report.ops, key=lambda row: -row.kernel_ns)[: max(0, top)]
    if not rows:
        return
    heading(console, f"Ops that cost most ({len(rows)} of {len(report.ops)}, over {_window(report)})")
    total, name = words.op_total_ns(report.ops), namer(report)
    columns, figures = _figures(report, rows, total)
    kept, room = fitting(width, [(title, least) for title, _, least in columns], figures)
    beside = width >= _BESIDE
    details = [clean(op_detail(row), _LONGEST_DETAIL) for row in rows]
    names = [
        clean(name(row) if detail or not row.phase else f"{name(row)}, {phase_text(row)}")
        for row, detail in zip(rows, details, strict=True)
    ]
    longest = int(room * _LONGEST_BESIDE) if beside else room
    table = new_table(
        (("op", "left" if beside else "name"), *(columns[k][:2] for k in kept), *((("where, with what", "name"),) if beside else ()))
    )
    for called, row, detail in zip(names, figures, details, strict=True):
        table.add_row(*cells(middle(called, longest), *(row[k] for k in kept), *([detail] if beside else [])))
    before, console.width = console.width, max(width, console.width)
    print_with_details(console, table, [""] * len(rows) if beside else [middle(detail, width - _INDENT) for detail in details])
    console.width = before
    for said in words.legend(rows):
        line(console, said, QUIET)


def _figures(report: ReportData, rows: list[OpRow], total_ns: int) -> tuple[list[tuple[str, str, int]], list[list[str]]]:
    """Return the columns (title, alignment, least width of the terminal) and the cells of each row."""
    flop, byte = words.flop_unit(report, rows), words.byte_unit(report, rows)
    columns = [
        ("calls", "right", 70),
        ("time", "right", 0),
        ("share", "right", 60),
        ("bound", "left", 0),
        ("of roof", "right", 0),
        (flop[0], "right", 75),
        (byte[0], "right", 92),
        ("FLOP/B", "right", 100),
    ]
    return columns, [_cells(row, total_ns, flop[1], byte[1]) for row in rows]


def _cells(row: OpRow, total_ns: int, flop_factor: float, byte_factor: float) -> list[str]:
    """Return the figures of one op in the order of their columns."""
    return [
        f"{row.count:,}",
        format_ns(row.kernel_ns),
        format_share(row.kernel_ns / total_ns if total_ns else None, 1),
        row.bound,
        words.of_roof(row),
        words.number(words.per_second(row.flops, row.kernel_ns), flop_factor),
        words.number(words.per_second(row.bytes, row.kernel_ns), byte_factor),
        words.number(words.intensity(row), 1),
    ]


def _window(report: ReportData) -> str:
    if not words.has_steps(report):
        return "the recorded window"
    return "1 step" if report.steps.count == 1 else f"{report.steps.count} steps"
