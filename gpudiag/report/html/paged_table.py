"""A table of the HTML page as plain values: the page holds the first rows of the first view, a script pages through all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec

from gpudiag.report import labels
from gpudiag.report.console import clean
from gpudiag.units import format_ns, format_share

MOST_ROWS = 2_000
"""Rows of one view; nobody reads more, and the page grows by some hundred bytes a row."""

PAGE_ROWS = 50
"""Rows shown at once: a browser lays out some tens of rows in milliseconds, and two thousand in a second."""


class TableColumn(msgspec.Struct, frozen=True):
    """A column of a table: its title, whether it sorts by number, and a longer explanation."""

    title: str
    numeric: bool = False
    help: str = ""


class TableCell(msgspec.Struct, frozen=True):
    """A cell: the text, the number it sorts by (None: not known, sorts last), and quieter lines below it."""

    text: str
    value: float | None = None
    details: tuple[str, ...] = ()


class TableRow(msgspec.Struct, frozen=True):
    """A row, and what it is found by: 'op', 'module' and 'phase' of a row of ops, the one key of a group."""

    cells: tuple[TableCell, ...]
    keys: dict[str, str] = {}


class TableView(msgspec.Struct, frozen=True):
    """Rows in an order, under their columns; `label` says what one row stands for where a table has several views."""

    id: str
    label: str
    columns: tuple[TableColumn, ...]
    rows: tuple[TableRow, ...]
    count: int


class PagedTable(msgspec.Struct, frozen=True):
    """One or more views of the same figures, the first shown at first; sorts, pages, and filters where it is long."""

    id: str
    views: tuple[TableView, ...]

    @property
    def page(self) -> tuple[TableRow, ...]:
        """Return the rows that the page shows before its script ran, and on paper."""
        return self.views[0].rows[:PAGE_ROWS]

    @property
    def count(self) -> str:
        """Return which rows are shown, in words."""
        shown, kept, count = len(self.page), len(self.views[0].rows), self.views[0].count
        rows = f"{count:,} {labels.pluralize(count, 'row')}"
        largest = f"the {kept:,} largest of {rows}" if kept < count else rows
        return f"1 to {shown:,} of {largest}" if shown < kept else largest

    @property
    def data(self) -> dict[str, Any]:
        """Return what the script needs: short keys and bare texts, for it is most of a long page."""
        views = []
        for view in self.views:
            rows = []
            for row in view.rows:
                cells = [
                    cell.text if cell.value is None and not cell.details else [cell.text, cell.value, *cell.details] for cell in row.cells
                ]
                rows.append({"c": cells, **({"k": row.keys} if row.keys else {})})
            columns = [[column.title, int(column.numeric), column.help] for column in view.columns]
            views.append({"id": view.id, "columns": columns, "rows": rows, "count": view.count})
        return {"page": PAGE_ROWS, "views": views}


def build_view(columns: Sequence[TableColumn], rows: Sequence[TableRow], identifier: str = "rows", label: str = "") -> TableView:
    """Return the view of the first rows; a column of text that is empty throughout is left out."""
    kept = [k for k, column in enumerate(columns) if column.numeric or any(row.cells[k].text for row in rows)]
    chosen = tuple(TableRow(tuple(row.cells[k] for k in kept), row.keys) for row in rows[:MOST_ROWS])
    return TableView(identifier, label, tuple(columns[k] for k in kept), chosen, len(rows))


def build_table(identifier: str, columns: Sequence[TableColumn], rows: Iterable[tuple[TableCell, ...]]) -> PagedTable:
    """Return a table with one view."""
    return PagedTable(identifier, (build_view(columns, [TableRow(cells) for cells in rows]),))


RowT = TypeVar("RowT")
CellMakers: TypeAlias = Mapping[TableColumn, Callable[[RowT], TableCell]]
"""The columns of a table, each with what makes its cell of a row."""


def tabulate(identifier: str, columns: CellMakers[RowT], rows: Iterable[RowT]) -> PagedTable:
    """Return a table with one view and a line for each of `rows`."""
    return build_table(identifier, list(columns), [tuple(make(row) for make in columns.values()) for row in rows])


def build_name_cell(text: str | None, limit: int = 160) -> TableCell:
    """Return a cell with a text of the trace, at most `limit` long."""
    return TableCell(clean(text, limit) if text else "")


def build_count_cell(value: int | None) -> TableCell:
    """Return a cell with a whole number."""
    return TableCell("?" if value is None else f"{value:,}", value)


def build_time_cell(ns: int | None) -> TableCell:
    """Return a cell with a duration, from ns."""
    return TableCell("?" if ns is None else format_ns(ns), ns)


def build_share_cell(value: float | None) -> TableCell:
    """Return a cell with a percentage, from a share 0..1."""
    return TableCell("?" if value is None else format_share(value, 1), value)


def build_number_cell(value: float | None, factor: float = 1) -> TableCell:
    """Return a cell with a scaled number of about three digits; it sorts by the number before scaling."""
    return TableCell(labels.format_number(value, factor), value)


def clean_details(*texts: str) -> tuple[str, ...]:
    """Return the texts that say something, cleaned: the quieter lines of a cell."""
    return tuple(clean(text, 240) for text in texts if text)
