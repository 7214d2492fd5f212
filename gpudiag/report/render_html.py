"""Blocks as one HTML file that needs no network: scripts and styles inside, nothing fetched, nothing evaluated from the recording."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from gpudiag.report.blocks import Block, Card, Cell, Chart, Document, Fold, Table
from gpudiag.report.console import clean, encode_script_json, join_units, split_code_lines
from gpudiag.report.labels import pluralize
from gpudiag.units import format_ns, format_share

if TYPE_CHECKING:
    from jinja2 import Environment

MOST_ROWS = 2_000
"""Rows of one view; nobody reads more, and the page grows by some hundred bytes a row."""

PAGE_ROWS = 50
"""Rows shown at once: a browser lays out some tens of rows in milliseconds, and two thousand in a second."""

_LONGEST, _LONGEST_CELL, _LONGEST_DETAIL = 3_500, 400, 240


def render_page(document: Document) -> str:
    """Return the page. plotly.js (its charts on two axes, 1.5 MB) is inside only where there is a chart."""
    shown = list(_walk(block for section in document.sections for block in section.blocks))
    tables = {block.id: trim_table(block) for block in shown if isinstance(block, Table) and block.id}
    charts = {f"{block.id}-figure": block.figure for block in shown if isinstance(block, Chart)}
    wanted = {"tables.js": tables, "report.js": True, "plotly-cartesian.min.js": charts}
    scripts = [read_asset(name) for name, needed in wanted.items() if needed]
    data = charts | {f"{name}-data": _encode_table(table) for name, table in tables.items()}
    return (
        _load_templates()
        .get_template("page.html.j2")
        .render(
            document=document,
            tables=tables,
            read_rules={block.anchor.removeprefix("rule-") for block in shown if isinstance(block, Fold) and block.anchor},
            csp=build_policy(scripts),
            css=read_asset("report.css"),
            scripts=scripts,
            data={name: encode_script_json(value) for name, value in data.items()},
        )
    )


def _walk(shown: Iterable[Block]) -> Iterator[Block]:
    for block in shown:
        yield block
        if isinstance(block, (Fold, Card)):
            yield from _walk(block.blocks)


def build_policy(scripts: list[str]) -> str:
    """Return the Content-Security-Policy: these scripts by their hashes (CSP level 2), inline styles, no request of any kind."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@cache
def read_asset(name: str) -> str:
    """Return the text of a file beside the templates."""
    return (files("gpudiag.report") / "templates" / name).read_text(encoding="utf-8")


@cache
def _load_templates() -> Environment:
    """Return the templates: every text is cleaned and escaped where it is written, a name that is not given is an error."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import escape

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(read_asset),
        finalize=lambda value: clean(value) if type(value) is str else value,
    )  # fmt: skip
    environment.filters |= {
        "kind": lambda block: type(block).__name__,
        "prose": lambda text: escape(join_units(clean(text, _LONGEST))),
        "line": lambda text: escape(clean(text, _LONGEST)),
        "code": lambda text: escape("\n".join(split_code_lines(text))),
        "code_line": lambda text: escape(" ".join(split_code_lines(text))),
        "is_link": is_link,
        "trimmed": trim_table,
        "count_rows": count_rows,
        "percent": lambda share: f"{min(1.0, max(0.0, share or 0.0)) * 100:.4f}",
        "time": format_ns,
        "share": lambda share: format_share(share, 1),
        "whole_share": format_share,
    }
    return environment


def is_link(text: str) -> bool:
    """Return whether a reference can be followed: only https is linked, and only when a reader clicks it."""
    return text.startswith("https://") and clean(text, _LONGEST) == text and " " not in text


def trim_table(table: Table) -> Table:
    """Return a table as pages show it: its first rows, no column that is empty throughout, details in the cell that names the row."""
    kept = [
        k for k, column in enumerate(table.columns)
        if column.page and (column.kind == "bar" or any(row.cells[k].text for row in table.rows))
    ]  # fmt: skip
    rows = []
    for row in table.rows[:MOST_ROWS]:
        cells = [_clean_cell(row.cells[k], row.detail if k == table.name_place else "") for k in kept]
        keys = {name: clean(text, 160) for name, text in row.keys.items()}
        rows.append(msgspec.structs.replace(row, cells=tuple(cells), detail="", keys=keys))
    columns, views = tuple(table.columns[k] for k in kept), tuple(map(trim_table, table.views))
    return msgspec.structs.replace(table, columns=columns, rows=tuple(rows), count=len(table.rows), views=views)


def _clean_cell(cell: Cell, detail: str) -> Cell:
    details = tuple(clean(text, _LONGEST_DETAIL) for text in (detail, *cell.details) if text)
    return msgspec.structs.replace(cell, text=clean(cell.text, _LONGEST_CELL), details=details)


def count_rows(table: Table) -> str:
    """Return which rows of a trimmed table a page shows at first, in words."""
    kept, count = len(table.rows), table.count
    shown = min(kept, PAGE_ROWS)
    rows = f"{count:,} {pluralize(count, 'row')}"
    largest = f"the {kept:,} largest of {rows}" if kept < count else rows
    return f"1 to {shown:,} of {largest}" if shown < kept else largest


def _encode_table(table: Table) -> dict[str, Any]:
    """Return what the script needs: short keys and bare texts, for it is most of a long page."""
    views = []
    for view in (table, *table.views):
        rows = []
        for row in view.rows:
            cells = [cell.text if cell.value is None and not cell.details else [cell.text, cell.value, *cell.details] for cell in row.cells]
            rows.append({"c": cells, **({"k": row.keys} if row.keys else {})})
        columns = [[column.title, int(column.numeric), column.help] for column in view.columns]
        name = "rows" if view is table else view.id
        views.append({"id": name, "columns": columns, "rows": rows, "count": view.count})
    return {"page": PAGE_ROWS, "views": views}
