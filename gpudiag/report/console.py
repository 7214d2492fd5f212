"""What every text for a terminal is made of: a console that writes into a string, harmless lines, tables without frames."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from gpudiag.report.escape import clean, joined

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

NARROWEST = 40
"""Columns below which nothing is laid out; narrower terminals wrap."""

QUIET = "bright_black"

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

    console.print(Padding(Text(unbroken(text), style=style), (0, 0, 0, indent)))


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


def cells(*values: str) -> list[RenderableType]:
    """Return the values as cells: no markup is read in them."""
    from rich.text import Text

    return [Text(value) for value in values]


def print_with_details(console: Console, table: Table, details: Sequence[str]) -> None:
    """Print a table whose rows take one line each, with a quieter line under each row that has a detail."""
    from rich.text import Text

    header, *lines = console.render_lines(table, pad=False)
    for segments, detail in zip([header, *lines], ["", *details], strict=True):
        console.print(Text.assemble(*((segment.text, segment.style or "") for segment in segments)), no_wrap=True, overflow="crop")
        if detail:
            console.print(Text(f"  {detail}", style=QUIET), no_wrap=True, overflow="ellipsis")
