"""`gpudiag cache`: what is kept beside a large recording so that it opens faster the second time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gpudiag.cli import outputs, terminal
from gpudiag.errors import InputError, UsageError
from gpudiag.report.escape import clean
from gpudiag.units import format_bytes

_CLEAR = "clear"
_WHAT = {
    "tables": "tables",
    "report": "report",
    "measured": "steps for comparisons",
    "rank": "summary",
}


def cache(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[clear] PATH", help="A bundle, a trace, or a folder of ranks; `clear PATH` deletes what is kept."),
    ],
) -> None:
    """Show what is kept beside a large recording so that it opens faster the second time, or delete it: `gpudiag cache clear PATH`.

    Nothing is kept for small recordings, nor where GPUDIAG_NO_CACHE=1 is set.
    """
    path = _path(words)
    outputs.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    outputs.check_there([path], "give a trace, a bundle, or a folder of ranks")
    from gpudiag.api.cache import place_of

    place = place_of(path)
    if place is None:
        raise InputError(f"{path}: cannot be looked into", "check its access rights")
    subject = Path(path).name if os.path.isfile(path) else None
    if words[0] == _CLEAR:
        _clear(place, subject)
    else:
        _show(place, subject)


def _path(words: list[str]) -> str:
    """Return the path that was given. Raises UsageError for none or several."""
    if words == [_CLEAR]:
        raise UsageError("clear what?", f"gpudiag cache clear PATH; a folder of that name is .{os.sep}{_CLEAR}")
    if len(words) > 1 + (words[0] == _CLEAR):
        raise UsageError("one PATH at a time", "gpudiag cache PATH, or gpudiag cache clear PATH")
    return words[-1]


def _show(place: Path, subject: str | None) -> None:
    from gpudiag.api.cache import WHOLE, listed

    kept = listed(place, subject)
    for one in kept:
        what = f"{_WHAT.get(one.kind, one.kind)} of {'the whole' if one.subject == WHOLE else one.subject}"
        terminal.out(f"{format_bytes(one.size_bytes):>9}  {clean(what, 300)}  {clean(str(one.path), 1_000)}\n")
    total = sum(one.size_bytes for one in kept)
    terminal.say(f"{format_bytes(total)} in {place}" if kept else f"nothing is kept in {place}{_why(place)}")


def _why(place: Path) -> str:
    """Return why nothing can be kept, where that is so."""
    from gpudiag.api.cache import NO_CACHE, switched_off, writable

    if switched_off():
        return f": {NO_CACHE} is set"
    if place.is_symlink():
        return ": it is a link, which is not followed"
    return "" if writable(place.parent) else f": {place.parent} is read-only"


def _clear(place: Path, subject: str | None) -> None:
    """Delete what is kept. Raises InputError where that is not allowed."""
    from gpudiag.api.cache import clear

    try:
        freed = clear(place, subject)
    except OSError as error:
        raise InputError(f"{place}: cannot be deleted: {error.strerror}", "check its access rights") from None
    terminal.say(f"deleted {format_bytes(freed)} from {place}" if freed else f"nothing is kept in {place}")
