"""`gpudiag demo`: train a small model for a few seconds and report on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpudiag.cli import terminal


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the bundle and the HTML report.", metavar="DIR")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train a small transformer for a few seconds, record it, and report on it."""
    from gpudiag import api

    with terminal.progress("training") as tell:
        made = api.demo(str(output), tell)
    terminal.out(made.report.text(width=terminal.columns(), top=10, color=terminal.coloured()))
    terminal.say(f"The recording is {made.bundle}; the report as a page is {made.html}")
