"""Options that several commands take, each declared once."""

from __future__ import annotations

import typer

RANK = typer.Option("--rank", min=0, metavar="N", help="Which rank of a folder to analyse (default: the lowest).", show_default=False)
GRAPH_CAPTURE = typer.Option(
    "--graph-capture",
    help="A trace of the pass that captured the CUDA graphs which PATH replays, or a folder of such.",
    metavar="FILE|FOLDER",
)
