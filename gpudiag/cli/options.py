"""Options that several commands take, each declared once."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from gpudiag.errors import UsageError

RULES = typer.Option("--rules", metavar="DIR", help="Also judge by the rules in DIR; may be repeated.")
NO_CACHE = typer.Option("--no-cache", help="Read everything anew, and keep nothing beside PATH for the next time.")
NO_CONFIG = typer.Option("--no-config", help="Ignore gpudiag.toml and [tool.gpudiag] of pyproject.toml.")
RANK = typer.Option("--rank", min=0, metavar="N", help="Which rank of a folder to analyse (default: the lowest).", show_default=False)
RANK_SHOWN = typer.Option(
    "--rank", min=0, metavar="N", help="Which rank of a job (default: the one that `gpudiag report` shows).", show_default=False
)
RANK_OR_ALL = typer.Option(
    "--rank", metavar="N|all", help="One rank of a job alone (default: all of them are compared).", show_default=False
)
SCHEDULER = typer.Option(
    "--scheduler",
    metavar="ADDRESS",
    help="Have the workers of a dask.distributed cluster read the ranks: tcp://host:port, tls://host:port, or a scheduler file.",
    show_default=False,
)
GRAPH_CAPTURE = typer.Option(
    "--graph-capture",
    help="A trace of the pass that captured the CUDA graphs which PATH replays, or a folder of such.",
    metavar="FILE|FOLDER",
)
GPU_HOUR_PRICE = typer.Option(
    "--gpu-hour-price",
    min=0.0,
    metavar="PRICE",
    help="Price of an hour of one device: the report then says what steps cost.",
    show_default=False,
)
PLANNED_STEPS = typer.Option(
    "--planned-steps", min=1, metavar="N", help="Steps of the whole run, to say what it costs.", show_default=False
)


def rank_or_all(text: str | None) -> int | None:
    """Return the rank that --rank names; None for all of them. Raises UsageError for anything else."""
    if text is None or text == "all":
        return None
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"--rank {text}: neither a number nor 'all'", "give the number of a rank, from 0")
    return int(text)


def check_watched(paths: Sequence[str], rank: str | None, scheduler: str | None) -> None:
    """Raise UsageError for what --watch cannot follow: it looks at one bundle, and at one rank of it."""
    if len(paths) > 1:
        raise UsageError("--watch follows one bundle", "give one PATH")
    if rank == "all" or scheduler is not None:
        what = "--scheduler" if scheduler is not None else "--rank all"
        raise UsageError(f"--watch follows one rank, and takes no {what}", "report on all ranks when the run is over")
