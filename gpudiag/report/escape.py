"""Text from a trace is untrusted: what makes it harmless in a terminal, in Markdown and inside a script element."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

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


def middle(text: str, limit: int) -> str:
    """Return `text` in at most `limit` characters, cut in the middle: names of ops and kernels differ at their ends as often as before."""
    if len(text) <= limit:
        return text
    kept = max(limit - 1, 0)
    last = kept // 3
    return f"{text[: kept - last]}…{text[len(text) - last :]}" if limit > 0 else ""


def tail(text: str, limit: int) -> str:
    """Return the end of a path, which tells more than its beginning, in at most `limit` characters."""
    return text if len(text) <= limit else f"…{text[len(text) - max(0, limit - 1) :]}"


def markdown(text: str, limit: int = 2_000) -> str:
    """Return `text` as Markdown prose that shows every character as it stands (safe in a table cell too)."""
    return _MARKDOWN.sub(r"\\\1", clean(text, limit).replace("&", "&amp;")).replace("@", "&#64;")


def code(text: str, limit: int = LONGEST, *, cell: bool = False) -> str:
    """Return `text` as a Markdown code span; `cell`: for a table, where a pipe must be escaped even in code."""
    text = clean(text, limit) or " "
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text.replace('|', chr(92) + '|') if cell else text}{pad}{fence}"


def joined(text: str, joint: str = "\u00a0") -> str:
    """Return `text` with numbers and their units held together by `joint` instead of a space."""
    return _QUANTITY.sub(joint, text)


def prose(text: str, limit: int = 2_000) -> str:
    """Return sentences for a page: as `clean`, not longer than `limit`, with numbers and their units on one line."""
    return joined(clean(text, limit))


def json_for_script(value: Any) -> str:
    """Return `value` as JSON that cannot end the script element that holds it: < > & and line separators are escaped."""
    import msgspec  # here: every command cleans what it says, and few write a page

    return msgspec.json.encode(value).decode().translate(_FOR_SCRIPT)


def for_encoding(text: str, encoding: str | None) -> str:
    """Return `text` with what `encoding` cannot write replaced: bars by '#', the rest by '?'."""
    encoding = encoding or "ascii"
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return text.translate(_ASCII).encode("ascii", errors="replace").decode("ascii")
    return text
