"""`gpudiag export perfetto|csv|parquet`: the recording and what was found in it, for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpudiag.cli import options, outputs, terminal
from gpudiag.errors import InputError

app = typer.Typer(help="Write the recording and what was found in it for other tools.", no_args_is_help=True, rich_markup_mode=None)

_PATH = typer.Argument(metavar="PATH", help="A trace, a bundle, or a folder of traces, one a rank.")
_FOLDER = typer.Option("--output", "-o", metavar="DIR", help="Folder for one file a table; made where it is missing.", show_default=False)


@app.command()
def perfetto(
    path: Annotated[str, _PATH],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="FILE (.json or .json.gz) to write.", show_default=False)],
    overlay_only: Annotated[bool, typer.Option("--overlay-only", help="Leave the recording's own events out.")] = False,
    rank: Annotated[int | None, options.RANK] = None,
) -> None:
    """Write the time line with tracks of critical path, idle causes, steps and queue depth (open it in ui.perfetto.dev)."""
    outputs.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    outputs.check_targets([output], path, (".json", ".gz"))
    from gpudiag.api.export import export_perfetto

    with terminal.progress("reading") as tell:
        export_perfetto(path, output, overlay_only=overlay_only, rank=rank, progress=tell)
    terminal.say(f"wrote {output}")


@app.command()
def csv(path: Annotated[str, _PATH], output: Annotated[Path, _FOLDER], rank: Annotated[int | None, options.RANK] = None) -> None:
    """Write every table as CSV."""
    _tables(path, output, "csv", rank)


@app.command()
def parquet(path: Annotated[str, _PATH], output: Annotated[Path, _FOLDER], rank: Annotated[int | None, options.RANK] = None) -> None:
    """Write every table as Parquet."""
    _tables(path, output, "parquet", rank)


def _tables(path: str, folder: Path, form: str, rank: int | None) -> None:
    outputs.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    if folder.is_file():
        raise InputError(f"cannot write into {folder}: it is a file", "name a folder")
    from gpudiag.api.export import export_tables

    with terminal.progress("reading") as tell:
        written = export_tables(path, folder, "csv" if form == "csv" else "parquet", rank=rank, progress=tell)
    terminal.say(f"wrote {len(written)} tables to {folder}")
