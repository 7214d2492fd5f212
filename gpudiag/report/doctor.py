"""What `gpudiag doctor` found, as text: the verdict, then what is wrong with its cost and fix, then what is right in short."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from gpudiag.report.escape import clean

_WRONG = ("missing", "limited", "unknown")
_LONGEST = 1_000
"""Characters of a text: drivers and libraries say what they like."""

Shown = Mapping[str, str]
"""A check: name, status, found, costs and fix."""


def doctor_text(verdict: str, checks: Sequence[Shown], width: int) -> str:
    """Return the page, in lines of at most `width` characters where words allow it."""
    shown = [{key: clean(text, _LONGEST) for key, text in check.items()} for check in checks]
    column = max((len(check["name"]) for check in shown), default=0) + 2
    lines = textwrap.wrap(clean(f"{verdict[:1].upper()}{verdict[1:]}.", _LONGEST), width)
    for status in _WRONG:
        found = [check for check in shown if check["status"] == status]
        lines += ["", status, *(line for check in found for line in _check(check, column, width))] if found else []
    right = [check for check in shown if check["status"] == "ok"]
    lines += ["", "ok", *(line for check in right for line in _row(check["name"], check["found"], column, width))] if right else []
    idle = [f"{check['name']} ({check['found']})" for check in shown if check["status"] == "not applicable"]
    lines += ["", "not applicable", *_wrapped(", ".join(idle), "  ", "  ", width)] if idle else []
    return "\n".join(lines) + "\n"


def _check(check: Shown, column: int, width: int) -> Iterator[str]:
    yield from _row(check["name"], check["found"], column, width)
    for title in ("costs", "fix"):
        if check[title]:
            yield from _row("", f"{title + ':':<7}{check[title]}", column, width, hanging=7)


def _row(name: str, text: str, column: int, width: int, hanging: int = 0) -> list[str]:
    return _wrapped(text, f"  {name:<{column}}", " " * (column + 2 + hanging), width)


def _wrapped(text: str, first: str, others: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False)
