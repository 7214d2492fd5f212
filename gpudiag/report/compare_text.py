"""A comparison for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpudiag.model.compare import StepComparison
from gpudiag.report import compare_words
from gpudiag.report.compare_words import Table
from gpudiag.report.console import QUIET, finished, fitting, heading, line, new_console, new_table, print_with_details
from gpudiag.report.escape import clean

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

TONES = {"good": "green", "bad": "red", "": ""}
_LEAST = {"device": 120, "phase": 100, "p95": 80, "samples/s": 70, "": 60, "median": 50, "A": 50, "B": 50}
"""Width of the terminal from which a column is shown, by its title; others always are."""
_NAMES = ("run", "op", "finding", "part of the profiled step")
"""Columns that take what the others leave."""


def render(found: StepComparison, *, width: int = 100, top: int = 15, color: bool = False) -> str:
    """Return the comparison for a terminal of `width` columns with the `top` ops that changed most."""
    console, sink = new_console(width, color)
    line(console, compare_words.headline(found), "bold")
    for said in found.warnings:
        line(console, f"! {said}", "yellow")
    for table in compare_words.tables(found, top):
        _table(console, table)
    if meaning := compare_words.meaning(found):
        console.print()
        line(console, meaning, QUIET)
    if gate := compare_words.gate_line(found):
        console.print()
        line(console, gate, "bold red" if found.gate and found.gate.fails else "bold")
    return finished(sink)


def _table(console: Console, table: Table) -> None:
    heading(console, table.title)
    if table.rows:
        kept = _kept(console.width, table)
        made = new_table([(table.columns[place][0], _align(table, place)) for place in kept])
        for row in table.rows:
            made.add_row(*(_cell(row[place].text, row[place].tone) for place in kept))
        print_with_details(console, made, _details(table, kept))
    for note in table.notes:
        line(console, note, QUIET)


def _details(table: Table, kept: list[int]) -> list[str]:
    """Return the line under each row: what tells it from others of its name, the phase too where its column is left out."""
    left_out = [place for place, (title, _) in enumerate(table.columns) if title == "phase" and place not in kept]
    details = table.details or ("",) * len(table.rows)
    rows = zip(table.rows, details, strict=True)
    return [clean(", ".join(text for text in (*(row[place].text for place in left_out), detail) if text), 400) for row, detail in rows]


def _kept(width: int, table: Table) -> list[int]:
    """Return the columns that are shown, by number."""
    others = [place for place, (title, _) in enumerate(table.columns) if title not in _NAMES]
    least = [(table.columns[place][0], 0 if place == 0 else _LEAST.get(table.columns[place][0], 0)) for place in others]
    shown, _ = fitting(width, least, [[clean(row[place].text) for place in others] for row in table.rows])
    dropped = {table.columns[place][0] for k, place in enumerate(others) if k not in shown}
    dropped |= {"A", "B"} if dropped & {"A", "B"} else set()  # one without the other compares nothing
    return [place for place, (title, _) in enumerate(table.columns) if place == 0 or title not in dropped]


def _align(table: Table, place: int) -> str:
    title, side = table.columns[place]
    return "right" if side == "r" else "name" if title in _NAMES else "left"


def _cell(text: str, tone: str) -> RenderableType:
    from rich.text import Text

    return Text(clean(text), style=TONES[tone])
