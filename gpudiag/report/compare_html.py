"""A comparison as one self-contained HTML page without scripts."""

from __future__ import annotations

from typing import Any

from gpudiag.model.compare import StepComparison
from gpudiag.report import compare_words
from gpudiag.report.compare_words import Table
from gpudiag.report.escape import clean, joined, prose
from gpudiag.report.html.templating import asset, policy, template

TOP = 200
_NAMES = ("op", "run")
_DETAILED = ("op", "finding")
_WIDE = (*_NAMES, *_DETAILED, "device", "part of the profiled step")


def render(found: StepComparison) -> str:
    """Return the page, with the TOP ops that changed most."""
    return template("compare.html.j2").render(
        policy=policy([]),
        style=asset("report.css"),
        title=clean(f"gpudiag: {found.a.path} against {found.b.path}", 200),
        headline=prose(compare_words.headline(found)),
        gate=prose(compare_words.gate_line(found)),
        gate_failed=found.gate is not None and found.gate.fails,
        warnings=[prose(said) for said in found.warnings],
        tables=[_table(table) for table in compare_words.tables(found, TOP)],
        meaning=prose(compare_words.meaning(found)),
    )


def _table(table: Table) -> dict[str, Any]:
    details = table.details or ("",) * len(table.rows)
    columns = [
        {"title": title, "number": side == "r", "name": title in _NAMES, "detail": title in _DETAILED, "wide": title in _WIDE}
        for title, side in table.columns
    ]
    rows = [
        {"cells": [{"text": joined(clean(cell.text)), "tone": cell.tone} for cell in row], "detail": prose(detail)}
        for row, detail in zip(table.rows, details, strict=True)
    ]
    return {"title": table.title, "columns": columns, "rows": rows, "notes": [prose(note) for note in table.notes]}
