"""`gpudiag dashboard`: the recordings of a folder in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpudiag.cli import terminal
from gpudiag.cli.command import interrupt_on_signals
from gpudiag.errors import InputError, MissingDependencyError


def dashboard(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with bundles or traces, at any depth.", show_default=False)
    ] = Path(),
    host: Annotated[str, typer.Option(help="Address to listen on; any but 127.0.0.1 asks for a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0: any free one.")] = 8050,
    host_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Name under which a proxy is asked for it, may be repeated; asks for a token.", show_default=False
        ),
    ] = None,
    base_path: Annotated[
        str, typer.Option(metavar="PATH", help="Path below which a proxy serves it, such as /gpudiag.", show_default=False)
    ] = "",
    allow_run: Annotated[
        bool, typer.Option("--allow-run", help="Allow the page to start experiments with the command recorded in a bundle.")
    ] = False,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve recordings to a browser: findings, timeline, roofline, ops, memory, live telemetry, experiments."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise InputError(f"{folder} {what}", "give a folder with bundles or traces, such as runs/")
    try:
        with terminal.show_progress("starting"):
            from gpudiag_dashboard.app import parse_base, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"dash", "flask", "waitress", "plotly"}:
            raise
        raise MissingDependencyError(
            f"the dashboard needs {error.name}, which is not installed", "pip install 'gpudiag[dashboard]'"
        ) from None
    with interrupt_on_signals():  # an experiment that it runs is ended in order too
        serve(
            folder,
            host=host,
            port=port,
            host_names=host_name or (),
            base=parse_base(base_path),
            allow_run=allow_run,
            open_browser=open_browser,
            say=terminal.write_note,
        )
