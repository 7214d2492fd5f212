"""Text made harmless for terminal, Markdown and script; a console that writes into a string."""

from __future__ import annotations

import io
import re
import unicodedata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
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
    if len(text) <= limit and text.isascii() and text.isprintable() and "  " not in text:  # most texts: nothing is to be done
        return text.strip()
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


def split_code_lines(text: str) -> list[str]:
    """Return the lines of a change of code, harmless, with their spaces: a diff and Python need them."""
    rows = (re.split(r"( +)", row.expandtabs(4).rstrip()) for row in text.splitlines())
    return ["".join(piece if piece.isspace() else clean(piece, 2_000) for piece in pieces).rstrip() for pieces in rows]


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

QUIET = "bright_black"

_JOINT = "\ue000"  # private use: `clean` removes it from names, so every one in the output is ours


def create_console(width: int, color: bool) -> tuple[Console, io.StringIO]:
    """Return a console of `width` columns and what it writes to; `collect_text` returns the text."""
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


def clean_unbroken(text: str, limit: int = 2_000) -> str:
    """Return `text`, harmless, with numbers and their units held together (`collect_text` turns the joint into a space again)."""
    return join_units(clean(text, limit), _JOINT)


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
