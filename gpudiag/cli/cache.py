"""`gpudiag cache`: what is kept beside a large recording so that it opens faster the second time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gpudiag.cli import options, terminal
from gpudiag.errors import InputError, UsageError
from gpudiag.report.console import clean
from gpudiag.units import format_bytes

_CLEAR = "clear"
_ENTRY_NAMES = {
    "tables": "tables",
    "report": "report",
    "measured": "steps for comparisons",
    "rank": "summary",
}


def cache(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[clear] PATH", help="A bundle, a trace, or a folder of ranks; `clear PATH` deletes what is cached."),
    ],
) -> None:
    """Show what is cached beside a large recording so that it opens faster, or delete it: `gpudiag cache clear PATH`.

    Small recordings are not cached, nor is anything where GPUDIAG_NO_CACHE=1 is set.
    """
    # The path that was given. Raises UsageError for none or several
    if words == [_CLEAR]:
        raise UsageError("clear what?", f"gpudiag cache clear PATH; a folder of that name is .{os.sep}{_CLEAR}")
    if len(words) > 1 + (words[0] == _CLEAR):
        raise UsageError("one PATH at a time", "gpudiag cache PATH, or gpudiag cache clear PATH")
    path = words[-1]
    options.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file or folder", "give a trace, a bundle, or a folder of ranks")
    from gpudiag.api.cache import find_cache_folder

    place = find_cache_folder(path)
    if place is None:
        raise InputError(f"{path}: cannot be looked into", "check its access rights")
    subject = Path(path).name if os.path.isfile(path) else None
    if words[0] == _CLEAR:
        # Delete what is kept. Raises InputError where that is not allowed
        from gpudiag.api.cache import clear_cache

        try:
            freed = clear_cache(place, subject)
        except OSError as error:
            raise InputError(f"{place}: cannot be deleted: {error.strerror}", "check its access rights") from None
        terminal.write_note(f"deleted {format_bytes(freed)} from {place}" if freed else f"nothing is cached in {place}")
    else:
        from gpudiag.api.cache import WHOLE_FOLDER, list_entries

        kept = list_entries(place, subject)
        for one in kept:
            what = f"{_ENTRY_NAMES.get(one.kind, one.kind)} of {'the whole' if one.subject == WHOLE_FOLDER else one.subject}"
            terminal.write_result(f"{format_bytes(one.size_bytes):>9}  {clean(what, 300)}  {clean(str(one.path), 1_000)}\n")
        total = sum(one.size_bytes for one in kept)
        terminal.write_note(
            f"{format_bytes(total)} in {place}" if kept else f"nothing is cached in {place}{_explain_nothing_cached(place)}"
        )


def _explain_nothing_cached(place: Path) -> str:
    from gpudiag.api.cache import NO_CACHE, is_switched_off, is_writable

    if is_switched_off():
        return f": {NO_CACHE} is set"
    if place.is_symlink():
        return ": it is a link, which is not followed"
    return "" if is_writable(place.parent) else f": {place.parent} is read-only"
