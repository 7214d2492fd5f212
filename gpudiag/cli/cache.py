"""`gpudiag cache`: what is kept of a large recording so that it opens faster the second time."""

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
    """Show what is cached of a large recording so that it opens faster, or delete it: `gpudiag cache clear PATH`.

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
    from gpudiag.api import cache as kept

    place = kept.find_place(path)
    if place is None:
        mend = "check its access rights, and set XDG_CACHE_HOME where there is no home folder"
        raise InputError(f"{path}: nothing can be cached of it", mend)
    subject = Path(path).name if os.path.isfile(path) else None
    if words[0] == _CLEAR:
        try:
            freed = kept.clear_entries(place, subject)
        except OSError as error:
            raise InputError(f"{place}: cannot be deleted: {error.strerror}", "check its access rights") from None
        terminal.write_note(f"deleted {format_bytes(freed)} from {place}" if freed else f"nothing is cached of {path}")
        return
    sizes = kept.list_entries(place, subject)
    for slot, size in sizes.items():
        what = f"{_ENTRY_NAMES.get(slot.kind, slot.kind)} of {'the whole' if slot.subject == kept.WHOLE_FOLDER else slot.subject}"
        terminal.write_result(f"{format_bytes(size):>9}  {clean(what, 300)}  {clean(str(slot.path), 1_000)}\n")
    off = f": {kept.NO_CACHE} is set" if kept.is_switched_off() else ""
    terminal.write_note(f"{format_bytes(sum(sizes.values()))} in {place}" if sizes else f"nothing is cached of {path}{off}")
