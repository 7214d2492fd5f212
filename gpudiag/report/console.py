"""Text made harmless for terminal, Markdown and script; a console that writes into a string, tables without frames."""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

LONGEST = 300
"""Characters of one name that are shown; names in traces can be megabytes."""

# ECMA-48: CSI sequences, OSC/DCS/APC/PM/SOS strings up to their terminator, then two-character escapes.
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?|\x9b[0-?]*[ -/]*[@-~]")
_QUANTITY = re.compile(r"(?<=\d) (?=(?:x|[num]?s|[kMGTP]?B(?:/s)?|[kMGTPE]?FLOP(?:/s)?)\b|%)")
_SPACE = re.compile(r"\s+")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~$])")
# Cc control, Cf format (bidi overrides, zero width), Cs surrogates (cannot be encoded), Co private use, Cn unassigned, Zl/Zp separators
_REMOVED = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_FOR_SCRIPT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})
_ASCII = str.maketrans(
    {"█": "#", "…": "~", "\u2212": "-", "\u00b5": "u", "\u03bc": "u", "\u00d7": "x", "\u2013": "-", "\u00b7": ".", "\u00b1": "+-"}
)


def clean(text: str, limit: int = LONGEST) -> str:
    """Return `text` on one line without escape sequences, control, bidi or invisible characters, at most `limit` long."""
    text = _SPACE.sub(" ", _ANSI.sub("", text[: 8 * limit]))
    text = "".join(character for character in text if unicodedata.category(character) not in _REMOVED).strip()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shorten_middle(text: str, limit: int) -> str:
    """Return `text` in at most `limit` characters, cut in the middle: names of ops and kernels differ at their ends as often as before."""
    if len(text) <= limit:
        return text
    kept = max(limit - 1, 0)
    last = kept // 3
    return f"{text[: kept - last]}…{text[len(text) - last :]}" if limit > 0 else ""


def shorten_path(text: str, limit: int) -> str:
    """Return the end of a path, which tells more than its beginning, in at most `limit` characters."""
    return text if len(text) <= limit else f"…{text[len(text) - max(0, limit - 1) :]}"


def escape_markdown(text: str, limit: int = 2_000) -> str:
    """Return `text` as Markdown prose that shows every character as it stands (safe in a table cell too)."""
    return _MARKDOWN.sub(r"\\\1", clean(text, limit).replace("&", "&amp;")).replace("@", "&#64;")


def format_table(header: Sequence[str], aligns: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; `aligns` has one letter a column (l or r); cells are escaped already."""
    rule = ["---:" if align == "r" else "---" for align in aligns]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def format_code_span(text: str, limit: int = LONGEST, *, cell: bool = False) -> str:
    """Return `text` as a Markdown code span; `cell`: for a table, where a pipe must be escaped even in code."""
    text = clean(text, limit) or " "
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text.replace('|', chr(92) + '|') if cell else text}{pad}{fence}"


def join_units(text: str, joint: str = "\u00a0") -> str:
    """Return `text` with numbers and their units held together by `joint` instead of a space."""
    return _QUANTITY.sub(joint, text)


def clean_prose(text: str, limit: int = 2_000) -> str:
    """Return sentences for a page: as `clean`, not longer than `limit`, with numbers and their units on one line."""
    return join_units(clean(text, limit))


def encode_script_json(value: Any) -> str:
    """Return `value` as JSON that cannot end the script element that holds it: < > & and line separators are escaped."""
    import msgspec  # here: every command cleans what it says, and few write a page

    return msgspec.json.encode(value).decode().translate(_FOR_SCRIPT)


def replace_unencodable(text: str, encoding: str | None) -> str:
    """Return `text` with what `encoding` cannot write replaced: bars by '#', the rest by '?'."""
    encoding = encoding or "ascii"
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", errors="replace").decode("ascii")
    return text


WIDEST_PROSE = 120
"""Columns of a paragraph at most: longer lines are hard to read, however wide the window."""

LEAST_NAME = 24
"""Columns that a name has in a table before figures are left out: a name that is cut to a few letters tells nothing."""

QUIET = "bright_black"
_GAP = 2
_UNLIMITED = 100_000

_JOINT = "\ue000"  # private use: `clean` removes it from names, so every one in the output is ours


def create_console(width: int, color: bool) -> tuple[Console, io.StringIO]:
    """Return a console of `width` columns and what it writes to; `finished` returns the text."""
    from rich.console import Console

    sink = io.StringIO()
    console = Console(
        file=sink,
        width=max(width, 40),  # columns below which nothing is laid out; narrower terminals wrap
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


def collect_text(sink: io.StringIO) -> str:
    """Return what was written, without spaces at the ends of lines."""
    lines = sink.getvalue().replace(_JOINT, " ").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip("\n") + "\n"


def clean_unbroken(text: str) -> str:
    """Return `text`, harmless, with numbers and their units held together (`finished` turns the joint into a space again)."""
    return join_units(clean(text, 2_000), _JOINT)


def print_line(console: Console, text: str, style: str = "", indent: int = 0) -> None:
    """Print one paragraph; `text` is made harmless here."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(clean_unbroken(text), style=style), (0, 0, 0, indent)), width=min(console.width, WIDEST_PROSE))


def print_item(console: Console, lead: str, text: str | Text, style: str = "", indent: int = 0) -> None:
    """Print a paragraph behind `lead`, such as '1. '; its further lines begin below its first word. A plain `text` is made harmless."""
    from rich.text import Text

    told = text if isinstance(text, Text) else Text(clean_unbroken(text), style=style)
    room = max(min(console.width, WIDEST_PROSE) - indent - len(lead), 1)
    for number, row in enumerate(told.wrap(console, room)):
        row.rstrip()
        console.print(Text.assemble(" " * indent, (" " * len(lead) if number else lead, style), row))


def print_heading(console: Console, text: str) -> None:
    """Print an empty line and a title."""
    console.print()
    print_line(console, text, "bold")


def create_table(columns: Sequence[tuple[str, str]]) -> Table:
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


def fit_columns(width: int, columns: Sequence[tuple[str, int]], figures: Sequence[Sequence[str]]) -> tuple[list[int], int]:
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


def format_cells(*values: str) -> list[RenderableType]:
    """Return the values as cells: no markup is read in them."""
    from rich.text import Text

    return [Text(value) for value in values]


def print_table(console: Console, table: Table) -> None:
    """Print a table as wide as its content, where that fits: figures far away from their names are hard to follow."""
    shrink_table(console, table)
    console.print(table)


def print_topics(console: Console, topics: Iterable[tuple[str, str]]) -> None:
    """Print (topic, text) as a table without titles; the texts are made harmless here."""
    table = create_table((("", "left"), ("", "wrapped")))
    for topic, text in topics:
        table.add_row(*format_cells(topic, clean_unbroken(text)))
    print_table(console, table)


def shrink_table(console: Console, table: Table) -> None:
    """Have a table take only the width of its content, where that fits."""
    from rich.measure import Measurement

    wide = console.options.update_width(_UNLIMITED)  # a measurement is cut at the width that it is made for
    table.expand = table.expand and Measurement.get(console, wide, table).maximum > console.width


def print_table_with_details(console: Console, table: Table, details: Sequence[str]) -> None:
    """Print a table whose rows take one line each, with a quieter line under each row that has a detail."""
    from rich.text import Text

    shrink_table(console, table)
    header, *lines = console.render_lines(table, pad=False)
    for segments, detail in zip([header, *lines], ["", *details], strict=True):
        console.print(Text.assemble(*((segment.text, segment.style or "") for segment in segments)), no_wrap=True, overflow="crop")
        if detail:
            console.print(Text(f"  {detail}", style=QUIET), no_wrap=True, overflow="ellipsis")
