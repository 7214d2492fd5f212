"""`gpudiag demo`: train a small model for a few seconds and report on it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gpudiag.cli import config, options, terminal

_QUIET_KINETO = "6"
"""KINETO_LOG_LEVEL above its last kind of message (5, USDT): nothing of the profiler's own log reaches the terminal."""


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the recording and its HTML report.", metavar="DIR")] = Path(
        "runs/demo"
    ),
    rules: Annotated[list[str] | None, options.RULES] = None,
    no_config: Annotated[bool, options.NO_CONFIG] = False,
) -> None:
    """Train a small transformer for a few seconds, record it, and report on it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET_KINETO)  # read once, when torch is imported
    from gpudiag import api

    chosen = None if no_config else config.find()
    with terminal.progress("training") as tell:
        made = api.demo(str(output), tell, rules_dirs=rules or [], config=chosen)
    terminal.out(made.report.text(width=terminal.columns(), top=10, color=terminal.coloured()))
    terminal.say(f"The recording is {made.bundle}; the report as a page is {made.html}")
