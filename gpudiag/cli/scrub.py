"""`gpudiag scrub PATH -o OUT`: a copy of a recording without what should not be shared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpudiag.cli import outputs, terminal
from gpudiag.errors import UsageError
from gpudiag.report.escape import clean

if TYPE_CHECKING:
    from gpudiag.api.scrub import Summary

_SHOWN = 20
"""Texts that --show lists."""


def scrub(
    path: Annotated[str | None, typer.Argument(metavar="PATH", help="A trace, a bundle, or a folder of traces, one a rank.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="The copy: .json, .json.gz or .json.zst, or a folder.", show_default=False),
    ] = None,
    keep_names: Annotated[bool, typer.Option("--keep-names", help="Keep the texts of your annotations and the names of folders.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that exists.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Show removed texts that also stand in names that are kept.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Show what is kept and what is removed, and stop.")] = False,
) -> None:
    """Write a copy of a recording that may be shared: only what is on a list is kept, reports stay the same (`--list` shows the list)."""
    if listing:
        _list()
        return
    if path is None or output is None:
        raise UsageError("scrub needs a recording and a place for the copy", "gpudiag scrub PATH -o OUT, or gpudiag scrub --list")
    outputs.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    from gpudiag.api.scrub import scrub as copy

    with terminal.progress("scrubbing") as tell:
        found = copy(path, output, force=force, keep_names=keep_names, tell=tell)
    terminal.say(
        f"wrote {output}" + (f" ({found.files} files; {found.left_out} were left out)" if found.files > 1 or found.left_out else "")
    )
    for line in _said(found, show=show):
        terminal.say(line)


def _said(found: Summary, *, show: bool) -> list[str]:
    """Return what was removed, and what reading the copy again showed."""
    removed = "; ".join(f"{kind}: {count:,}" for kind, count in found.removed.items())
    some = "" if found.complete else " (there were more than could be remembered)"
    checked = f"checked: the copy was read again for {found.looked_for:,} removed texts{some}"
    lines = [f"removed or replaced: {removed or 'nothing'}"]
    if not found.left:
        return [*lines, f"{checked}; none stands in it"]
    hint = "" if show else "; --show lists them"
    lines.append(f"{checked}; {len(found.left):,} also stand in names that are kept, look at them before you share it{hint}")
    return lines + ([f"  {clean(text, 100)}" for text in found.left[:_SHOWN]] if show else [])


def _list() -> None:
    """Write the allow-list."""
    from gpudiag.api.scrub.listing import listing

    terminal.out(listing(terminal.columns()))
