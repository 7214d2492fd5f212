"""`gpudiag export perfetto|csv|parquet`: the recording and what was found in it, for other tools."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from gpudiag.cli import options, outputs, terminal
from gpudiag.cli.plain import PlainCommand, PlainGroup
from gpudiag.errors import InputError

app = typer.Typer(
    cls=PlainGroup, help="Write the recording and what was found in it for other tools.", no_args_is_help=True, rich_markup_mode=None
)
_command = partial(app.command, cls=PlainCommand)

_PATH = typer.Argument(metavar="PATH", help="A trace, a bundle, or a folder of traces, one a rank.")
_WINDOW = typer.Option(
    "--window", min=0, metavar="N", help="Which window of a bundle (default: the first complete one).", show_default=False
)
_FOLDER = typer.Option("--output", "-o", metavar="DIR", help="Folder for one file a table; made where it is missing.", show_default=False)


@_command()
def perfetto(
    path: Annotated[str, _PATH],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="FILE (.json or .json.gz) to write.", show_default=False)],
    overlay_only: Annotated[bool, typer.Option("--overlay-only", help="Leave the recording's own events out.")] = False,
    rank: Annotated[int | None, options.RANK] = None,
    window: Annotated[int | None, _WINDOW] = None,
) -> None:
    """Write the time line with tracks of longest path, idle causes, steps, work by its bound, and queue depth (for ui.perfetto.dev)."""
    outputs.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    outputs.check_targets([output], path, (".json", ".gz"))
    from gpudiag.api.export import export_perfetto

    with terminal.progress("reading") as tell:
        export_perfetto(path, output, overlay_only=overlay_only, rank=rank, window=window, progress=tell)
    terminal.say(f"wrote {output}; open it in ui.perfetto.dev or chrome://tracing")


@_command()
def csv(
    path: Annotated[str, _PATH],
    output: Annotated[Path, _FOLDER],
    rank: Annotated[int | None, options.RANK] = None,
    window: Annotated[int | None, _WINDOW] = None,
) -> None:
    """Write every table as CSV; columns.csv among them says what each column is, and in which unit."""
    _tables(path, output, "csv", rank, window)


@_command()
def parquet(
    path: Annotated[str, _PATH],
    output: Annotated[Path, _FOLDER],
    rank: Annotated[int | None, options.RANK] = None,
    window: Annotated[int | None, _WINDOW] = None,
) -> None:
    """Write every table as Parquet; columns.csv among them says what each column is, and in which unit."""
    _tables(path, output, "parquet", rank, window)


def _tables(path: str, folder: Path, form: Literal["csv", "parquet"], rank: int | None, window: int | None) -> None:
    outputs.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    if folder.is_file():
        raise InputError(f"cannot write into {folder}: it is a file", "name a folder")
    from gpudiag.api.export import export_tables

    with terminal.progress("reading") as tell:
        written = export_tables(path, folder, form, rank=rank, window=window, progress=tell)
    terminal.say(f"wrote {len(written) - 1} tables to {folder}; columns.csv says what their columns are")
