"""`gpudiag mcp`: recordings for a coding agent; `gpudiag skill`: what it has to know."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpudiag.cli import config, terminal
from gpudiag.cli.command import interrupt_on_signals
from gpudiag.errors import InputError, MissingDependencyError


def mcp(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder with recordings and scripts: nothing outside of it is opened.", show_default=False),
    ] = Path(),
    allow_run: Annotated[
        bool, typer.Option("--allow-run", help="Allow the agent to start Python scripts of DIR with `gpudiag run` and `gpudiag ab`.")
    ] = False,
    time_limit: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time limit of one question to a recording.")] = 300,
    no_config: Annotated[bool, typer.Option("--no-config", help="Ignore gpudiag.toml and [tool.gpudiag] of pyproject.toml.")] = False,
) -> None:
    """Serve the recordings of a folder to a coding agent by the Model Context Protocol, on stdin and stdout; a client starts it."""
    if not folder.is_dir():
        raise InputError(
            f"{folder} {'is a file, not a folder' if folder.exists() else 'does not exist'}", "give a folder with recordings, such as runs/"
        )
    _require_mcp()
    from gpudiag.agents.server import serve
    from gpudiag.diagnosis.config import Config

    chosen = Config() if no_config else config.find_config(folder)
    if sys.stdin is not None and sys.stdin.isatty():
        terminal.write_note("gpudiag: a client of the Model Context Protocol starts this and talks to its standard input; Ctrl-C ends it")
    with interrupt_on_signals():
        serve(folder.resolve(), chosen, allow_run=allow_run, limit_s=time_limit)


def _require_mcp() -> None:
    from gpudiag.cache import find_version

    found = find_version("mcp")
    if found is None or int(found.partition(".")[0]) < 2:
        missing = "which is not installed" if found is None else f"this is {found}"
        raise MissingDependencyError(f"gpudiag mcp needs the library mcp 2, {missing}", "pip install 'gpudiag[mcp]'")


def skill() -> None:
    """Print a SKILL.md for coding agents: how to ask gpudiag, how to read its answers, what not to conclude from them."""
    from gpudiag.agents.skill import read_skill

    terminal.write_result(read_skill())
