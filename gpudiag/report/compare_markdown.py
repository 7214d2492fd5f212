"""A comparison as GitHub Markdown, for pull requests and job summaries."""

from __future__ import annotations

from gpudiag.model.compare import StepComparison
from gpudiag.report import compare_words
from gpudiag.report.compare_words import Table
from gpudiag.report.escape import code, markdown

_NAMES = ("op", "run")
"""Columns whose texts come from a recording or a command line: shown as code."""


def render(found: StepComparison, *, top: int = 30) -> str:
    """Return the comparison as Markdown with the `top` ops that changed most."""
    gate = compare_words.gate_line(found)
    blocks = [
        "# gpudiag compare",
        f"**{markdown(compare_words.headline(found))}**",
        f"**{markdown(gate)}**" if gate else "",
        "\n".join(f"- **Warning:** {markdown(said)}" for said in found.warnings),
        *(_table(table) for table in compare_words.tables(found, top)),
        markdown(compare_words.meaning(found)),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _table(table: Table) -> str:
    header = [markdown(title) for title, _ in table.columns]
    rule = ["---:" if side == "r" else "---" for _, side in table.columns]
    details = table.details or ("",) * len(table.rows)
    rows = [_row(table, place, details[place]) for place in range(len(table.rows))]
    shown = "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)) if rows else ""
    notes = "\n".join(f"- {markdown(note)}" for note in table.notes)
    return "\n\n".join(text for text in (f"## {markdown(table.title)}", shown, notes) if text)


def _row(table: Table, place: int, detail: str) -> list[str]:
    cells = []
    for (title, _), cell in zip(table.columns, table.rows[place], strict=True):
        shown = code(cell.text, cell=True) if title in _NAMES else markdown(cell.text)
        cells.append(f"{shown}<br>{markdown(detail, 300)}" if detail and title in {"op", "finding"} else shown)
    return cells
