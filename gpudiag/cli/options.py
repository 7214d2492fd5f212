"""Options that several commands take, each declared once, and the files that they name, checked before the work starts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from gpudiag.cli import completion
from gpudiag.errors import InputError, UsageError

PATH = typer.Argument(
    metavar="PATH", help="A trace, a bundle, or a folder of traces, one a rank.", autocompletion=completion.complete_recording
)
SCRIPT = typer.Argument(
    metavar="SCRIPT [ARGS]...",
    help="A Python script, or a program such as torchrun, and its arguments.",
    autocompletion=completion.complete_script,
)


def build_fix_option(does: str) -> Any:
    """Return the option --fix, which may be repeated; `does`: what happens with the fix, 'Try this fix'."""
    said = f"{does} (`gpudiag fixes` lists them); may be repeated."
    return typer.Option("--fix", metavar="ID[=VALUE]", help=said, autocompletion=completion.complete_fix)


SHARED_OK = typer.Option("--shared-ok", help="Measure even if others use the GPU, or run experiments on this machine.")
WARM = typer.Option("--warm", min=1, help="Steps to warm up the profiler.")
SITES = typer.Option("--sites", min=0, help="Steps with Python stacks, for call sites (0: none).")
JSON_FILE = typer.Option("--json", metavar="FILE", help="Also write the result to FILE.", show_default=False)
RULES = typer.Option("--rules", metavar="DIR", help="Also apply the rules in DIR; may be repeated.")
NO_CACHE = typer.Option("--no-cache", help="Read everything anew and keep nothing.")
NO_CONFIG = typer.Option("--no-config", help="Ignore gpudiag.toml and [tool.gpudiag] of pyproject.toml.")
RANK = typer.Option("--rank", min=0, metavar="N", help="Rank of a folder to analyse (default: the lowest).", show_default=False)
RANK_SHOWN = typer.Option(
    "--rank", min=0, metavar="N", help="Rank of a job (default: the one that `gpudiag report` shows).", show_default=False
)
RANK_OR_ALL = typer.Option("--rank", metavar="N|all", help="Analyse one rank of a job alone (default: compare all).", show_default=False)
SCHEDULER = typer.Option(
    "--scheduler",
    metavar="ADDRESS",
    help="Read the ranks on the workers of a dask.distributed cluster: tcp://host:port, tls://host:port, or a scheduler file.",
    show_default=False,
)
GRAPH_CAPTURE = typer.Option(
    "--graph-capture",
    help="Trace of the capture of the CUDA graphs that PATH replays, or a folder of such traces.",
    metavar="FILE|FOLDER",
)
GPU_HOUR_PRICE = typer.Option(
    "--gpu-hour-price",
    min=0.0,
    metavar="PRICE",
    help="Price per device hour; the report then shows what steps cost.",
    show_default=False,
)
PLANNED_STEPS = typer.Option("--planned-steps", min=1, metavar="N", help="Steps of the whole run, for its total cost.", show_default=False)

_SHARE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)")


def parse_rank(text: str | None) -> int | None:
    """Return the rank that --rank names; None for all of them. Raises UsageError for anything else."""
    if text is None or text == "all":
        return None
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"--rank {text}: neither a number nor 'all'", "give the number of a rank, from 0")
    return int(text)


def parse_share(option: str, text: str, hint: str, *, zero: bool = True) -> float:
    """Return 0.03 for '3%' or '0.03'. Raises UsageError for what is not between 0 and 1; `zero`: 0 itself is a share too."""
    match = _SHARE.fullmatch(text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1 or (value == 0 and not zero):
        raise UsageError(f"{option} {text}: no share", hint)
    return value


def check_watch(paths: Sequence[str], rank: str | None, scheduler: str | None) -> None:
    """Raise UsageError for what --watch cannot follow: it looks at one bundle, and at one rank of it."""
    if len(paths) > 1:
        raise UsageError("--watch follows one bundle", "give one PATH")
    if rank == "all" or scheduler is not None:
        what = "--scheduler" if scheduler is not None else "--rank all"
        raise UsageError(f"--watch follows one rank, and takes no {what}", "report on all ranks when the run is over")


def check_named(what: str, paths: Sequence[str], hint: str) -> None:
    """Raise InputError where one of `paths` is empty: a variable that was not set. The folder that one stands in is '.'."""
    if not all(path.strip() for path in paths):
        raise InputError(f"{what} is empty", hint)


def check_captures(paths: Sequence[str]) -> None:
    """Raise InputError where a path given as --graph-capture is empty or does not exist."""
    check_named("--graph-capture", paths, "give a trace, or a folder of such")
    for path in paths:
        if not os.path.exists(path):
            raise InputError(f"{path}: no such file or folder", "--graph-capture names a trace, or a folder of such")


def check_targets(targets: Sequence[Path], source: str, suffixes: Sequence[str] = (".html", ".md", ".json")) -> None:
    """Raise UsageError or InputError where a target has no known suffix, no folder, or would overwrite what is read."""
    for target in targets:
        try:
            if target.suffix.lower() not in suffixes:
                raise UsageError(
                    f"cannot write {target}: the format is not known by its suffix",
                    f"use {'one of ' if len(suffixes) > 1 else ''}{', '.join(suffixes)}",
                )
            if not target.parent.is_dir():
                raise InputError(f"cannot write {target}: there is no folder {target.parent}", "make it first")
            if target.is_dir():
                raise InputError(f"cannot write {target}: it is a folder", "name a file")
            # The file that is read, or a file in the folder that is read and no report of it
            overwrites = os.path.exists(source) and target.exists() and target.samefile(source)
            if os.path.isdir(source) and target.exists():
                overwrites = Path(source).resolve() in target.resolve().parents and target.stem != "report"
            if overwrites:
                raise UsageError(f"will not overwrite {target}: it is part of what is read", "choose another name")
        except OSError as error:  # a name that is too long, a folder that may not be looked into
            raise InputError(f"cannot write {target}: {error.strerror}", "choose another place") from None
