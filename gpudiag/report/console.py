"""What every text for a terminal is made of: a console that writes into a string, harmless lines, tables without frames."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from gpudiag.report.escape import clean, joined

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

NARROWEST = 40
"""Columns below which nothing is laid out; narrower terminals wrap."""

WIDEST_PROSE = 120
"""Columns of a paragraph at most: longer lines are hard to read, however wide the window."""

LEAST_NAME = 24
"""Columns that a name has in a table before figures are left out: a name that is cut to a few letters tells nothing."""

QUIET = "bright_black"
_GAP = 2
"""Columns between two columns of a table."""
_UNLIMITED = 100_000

_JOINT = "\ue000"  # private use: `clean` removes it from names, so every one in the output is ours


def new_console(width: int, color: bool) -> tuple[Console, io.StringIO]:
    """Return a console of `width` columns and what it writes to; `finished` returns the text."""
    from rich.console import Console

    sink = io.StringIO()
    console = Console(
        file=sink,
        width=max(width, NARROWEST),
        height=100,
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
        force_jupyter=False,
    )
    return console, sink


def finished(sink: io.StringIO) -> str:
    """Return what was written, without spaces at the ends of lines."""
    lines = sink.getvalue().replace(_JOINT, " ").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip("\n") + "\n"


def unbroken(text: str) -> str:
    """Return `text`, harmless, with numbers and their units held together (`finished` turns the joint into a space again)."""
    return joined(clean(text, 2_000), _JOINT)


def line(console: Console, text: str, style: str = "", indent: int = 0) -> None:
    """Print one paragraph; `text` is made harmless here."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(unbroken(text), style=style), (0, 0, 0, indent)), width=min(console.width, WIDEST_PROSE))


def item(console: Console, lead: str, text: str | Text, style: str = "", indent: int = 0) -> None:
    """Print a paragraph behind `lead`, such as '1. '; its further lines begin below its first word. A plain `text` is made harmless."""
    from rich.text import Text

    told = text if isinstance(text, Text) else Text(unbroken(text), style=style)
    room = max(min(console.width, WIDEST_PROSE) - indent - len(lead), 1)
    for number, row in enumerate(told.wrap(console, room)):
        row.rstrip()
        console.print(Text.assemble(" " * indent, (" " * len(lead) if number else lead, style), row))


def heading(console: Console, text: str) -> None:
    """Print an empty line and a title."""
    console.print()
    line(console, text, "bold")


def new_table(columns: Sequence[tuple[str, str]]) -> Table:
    """Return an empty table without lines; a column is (title, 'left' | 'right' | 'name' | 'wrapped'); the last two take what is left."""
    from rich.table import Table

    titled = any(title for title, _ in columns)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=QUIET, show_header=titled)
    for title, align in columns:
        justify: Literal["left", "right"] = "right" if align == "right" else "left"
        ratio = 1 if align in {"name", "wrapped"} else None
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if align == "name" else "fold"
        table.add_column(title, justify=justify, no_wrap=align != "wrapped", overflow=overflow, ratio=ratio)
    table.expand = any(align in {"name", "wrapped"} for _, align in columns)
    return table


def fitting(width: int, columns: Sequence[tuple[str, int]], figures: Sequence[Sequence[str]]) -> tuple[list[int], int]:
    """Return which of `columns` (title, least width of the terminal) are shown beside a name, by number, and what is left for the name.

    `figures`: their cells, row by row. Where less than LEAST_NAME would be left, those go first that want the widest terminal; those
    that want none stay.
    """
    taken = {k: _GAP + max(len(text) for text in (title, *(row[k] for row in figures))) for k, (title, _) in enumerate(columns)}
    kept = [k for k, (_, least) in enumerate(columns) if least <= width]
    for k in sorted(kept, key=lambda k: (-columns[k][1], -k)):
        if width - sum(taken[k] for k in kept) >= LEAST_NAME or not columns[k][1]:
            break
        kept.remove(k)
    return kept, max(width - sum(taken[k] for k in kept), 1)


def cells(*values: str) -> list[RenderableType]:
    """Return the values as cells: no markup is read in them."""
    from rich.text import Text

    return [Text(value) for value in values]


def print_table(console: Console, table: Table) -> None:
    """Print a table as wide as its content, where that fits: figures far away from their names are hard to follow."""
    snug(console, table)
    console.print(table)


def snug(console: Console, table: Table) -> None:
    """Have a table take only the width of its content, where that fits."""
    from rich.measure import Measurement

    wide = console.options.update_width(_UNLIMITED)  # a measurement is cut at the width that it is made for
    table.expand = table.expand and Measurement.get(console, wide, table).maximum > console.width


def print_with_details(console: Console, table: Table, details: Sequence[str]) -> None:
    """Print a table whose rows take one line each, with a quieter line under each row that has a detail."""
    from rich.text import Text

    snug(console, table)
    header, *lines = console.render_lines(table, pad=False)
    for segments, detail in zip([header, *lines], ["", *details], strict=True):
        console.print(Text.assemble(*((segment.text, segment.style or "") for segment in segments)), no_wrap=True, overflow="crop")
        if detail:
            console.print(Text(f"  {detail}", style=QUIET), no_wrap=True, overflow="ellipsis")
