"""`gpudiag export perfetto|csv|parquet`: the recording for other tools; `gpudiag scrub`: a copy to share; `gpudiag schema`: the shape of
what gpudiag writes."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer

from gpudiag.cli import options, terminal
from gpudiag.cli.command import PlainCommand, PlainGroup
from gpudiag.errors import InputError, UsageError
from gpudiag.report.console import clean

export_app = typer.Typer(
    cls=PlainGroup, help="Export a recording and its analysis for other tools.", no_args_is_help=True, rich_markup_mode=None
)
_command = partial(export_app.command, cls=PlainCommand)

_WINDOW = typer.Option(
    "--window", min=0, metavar="N", help="Which window of a bundle (default: the first complete one).", show_default=False
)
_FOLDER = typer.Option("--output", "-o", metavar="DIR", help="Folder for one file a table; made where it is missing.", show_default=False)


@_command()
def perfetto(
    path: Annotated[str, options.PATH],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="FILE (.json or .json.gz) to write.", show_default=False)],
    overlay_only: Annotated[bool, typer.Option("--overlay-only", help="Leave out the events of the recording itself.")] = False,
    rank: Annotated[int | None, options.RANK] = None,
    window: Annotated[int | None, _WINDOW] = None,
) -> None:
    """Write the timeline with tracks for critical path, idle causes, steps, work by bound, and queue depth (for ui.perfetto.dev)."""
    options.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    options.check_targets([output], path, (".json", ".gz"))
    from gpudiag.queries import export_perfetto

    with terminal.show_progress("reading") as tell:
        export_perfetto(path, output, overlay_only=overlay_only, rank=rank, window=window, progress=tell)
    terminal.write_note(f"wrote {output}; open it in ui.perfetto.dev or chrome://tracing")


@_command()
def csv(
    path: Annotated[str, options.PATH],
    output: Annotated[Path, _FOLDER],
    rank: Annotated[int | None, options.RANK] = None,
    window: Annotated[int | None, _WINDOW] = None,
) -> None:
    """Write every table as CSV; columns.csv explains each column and its unit."""
    _export_tables(path, output, "csv", rank, window)


@_command()
def parquet(
    path: Annotated[str, options.PATH],
    output: Annotated[Path, _FOLDER],
    rank: Annotated[int | None, options.RANK] = None,
    window: Annotated[int | None, _WINDOW] = None,
) -> None:
    """Write every table as Parquet; columns.csv explains each column and its unit."""
    _export_tables(path, output, "parquet", rank, window)


def _export_tables(path: str, folder: Path, form: Literal["csv", "parquet"], rank: int | None, window: int | None) -> None:
    options.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    if folder.is_file():
        raise InputError(f"cannot write into {folder}: it is a file", "name a folder")
    from gpudiag.queries import export_tables

    with terminal.show_progress("reading") as tell:
        written = export_tables(path, folder, form, rank=rank, window=window, progress=tell)
    terminal.write_note(f"wrote {len(written) - 1} tables to {folder}; columns.csv explains their columns")


_MAX_SHOWN = 20


def scrub(
    path: Annotated[str | None, typer.Argument(metavar="PATH", help="A trace, a bundle, or a folder of traces, one a rank.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="The copy: .json, .json.gz or .json.zst, or a folder.", show_default=False),
    ] = None,
    keep_names: Annotated[bool, typer.Option("--keep-names", help="Keep your names of annotations, files and functions.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Show removed texts that also occur in names that stay.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Show what stays and what is removed, then stop.")] = False,
) -> None:
    """Write a copy of a recording that is safe to share: all text that is not on a list is removed; reports stay the same."""
    if listing:
        from gpudiag.scrub.words import KEEP_LIST

        terminal.write_result(KEEP_LIST)
        return
    if path is None or output is None:
        raise UsageError("scrub needs a recording and a place for the copy", "gpudiag scrub PATH -o OUT, or gpudiag scrub --list")
    options.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    from gpudiag.scrub.recording import scrub as copy

    with terminal.show_progress("scrubbing") as tell:
        found = copy(path, output, force=force, keep_names=keep_names, tell=tell)
    terminal.write_note(
        f"wrote {output}" + (f" ({found.files} files; {found.left_out} were left out)" if found.files > 1 or found.left_out else "")
    )
    removed = "; ".join(f"{kind}: {count:,}" for kind, count in found.removed.items())
    terminal.write_note(f"removed or replaced: {removed or 'nothing'}")
    some = "" if found.complete else " (there were more than could be remembered)"
    checked = f"checked: {found.looked_for:,} removed texts were looked for in the copy{some}"
    if not found.left:
        terminal.write_note(f"{checked}; none is in it")
        return
    hint = "" if show else "; --show lists them"
    terminal.write_note(f"{checked}; {len(found.left):,} also occur in names that stay; look at them before you share it{hint}")
    for text in found.left[:_MAX_SHOWN] if show else ():
        terminal.write_note(f"  {clean(text, 100)}")


schema_app = typer.Typer(cls=PlainGroup, help="Print the JSON Schema of what gpudiag writes.", no_args_is_help=True)

_WRITTEN = {
    "report": ("`gpudiag report PATH -o report.json` writes", "gpudiag.model.report:ReportData"),
    "whatif": ("`gpudiag whatif PATH --json out.json` writes", "gpudiag.queries:WhatIfs"),
    "memory": ("`gpudiag memory PATH --json out.json` writes", "gpudiag.memory_report:MemoryFound"),
    "experiments": ("`gpudiag ab --json out.json` writes", "gpudiag.model.experiment:ExperimentData"),
    "compare": ("`gpudiag compare A B --json` prints", "gpudiag.model.comparison:StepComparison"),
    "check": ("`gpudiag check PATH --json` prints", "gpudiag.model.comparison:CheckData"),
}
"""What is written, and its struct, which is loaded for its own command alone."""


def _add_command(name: str, what: str, place: str) -> None:
    def print_schema() -> None:
        import msgspec

        module, _, struct = place.partition(":")
        terminal.write_result(terminal.format_json(msgspec.json.schema(getattr(import_module(module), struct))))

    schema_app.command(name, cls=PlainCommand, help=f"Print the schema of what {what}.")(print_schema)


for _name, (_what, _place) in _WRITTEN.items():
    _add_command(_name, _what, _place)
