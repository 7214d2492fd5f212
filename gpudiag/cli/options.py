"""Options that several commands take, each declared once."""

from __future__ import annotations

import typer

RULES = typer.Option("--rules", metavar="DIR", help="Also judge by the rules in DIR; may be repeated.")
NO_CONFIG = typer.Option("--no-config", help="Ignore gpudiag.toml and [tool.gpudiag] of pyproject.toml.")
RANK = typer.Option("--rank", min=0, metavar="N", help="Which rank of a folder to analyse (default: the lowest).", show_default=False)
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
