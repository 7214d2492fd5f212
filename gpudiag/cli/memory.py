"""`gpudiag memory`: what memory was used for when most of it was in use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpudiag.cli import options, outputs, terminal
from gpudiag.cli.estimate import estimate
from gpudiag.errors import UsageError
from gpudiag.report import files


def memory(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH",
            help="A bundle or trace with memory recorded, or a snapshot of the CUDA allocator (_dump_snapshot, .pickle). With --estimate: "
            "a preset (playbook, llama3-8b), or FILE.py:FUNCTION. FILE.py is then executed; FUNCTION() returns (model, batch), or a dict "
            "of model, batch, loss, optimizer, autocast, and is run on tensors without data.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=0, metavar="N", help="Call sites, modules and ops to list.")] = 10,
    rank: Annotated[int | None, options.RANK] = None,
    device: Annotated[
        int | None,
        typer.Option("--device", min=0, metavar="N", help="Which GPU (default: the one with most memory in use).", show_default=False),
    ] = None,
    estimated: Annotated[
        bool, typer.Option("--estimate", help="No recording: estimate the memory of training a transformer from its sizes, or any model.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="With --estimate: a size, such as batch=8, hidden=4096, layers=32, mixed_precision=true, recompute=full; of a FILE.py "
            "optimizer=SGD, autocast=bf16, device=cpu, accumulate=true; may be given several times.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result to FILE.", show_default=False)] = None,
) -> None:
    """Say what memory was used for at its peak, and where it was allocated; or estimate it before anything runs."""
    if estimated:
        if rank is not None or device is not None:
            raise UsageError("--rank and --device choose from a recording, --estimate has none", "leave them out")
        estimate(path, settings or [], json)
        return
    if path is None or settings:
        raise UsageError("--set goes with --estimate" if settings else "no PATH", "give a bundle, a trace or a snapshot, or --estimate")
    outputs.check_named("PATH", [path], "give a bundle, a trace or a snapshot")
    if json is not None:
        outputs.check_targets([json], path, (".json",))
    from gpudiag.api.memory import memory as find
    from gpudiag.report.memory import render

    with terminal.progress("reading") as tell:
        found = find(path, rank=rank, device=device, progress=tell)
    terminal.out(render(found.memory, width=terminal.columns(), top=top, color=terminal.coloured()))
    if json is not None:
        import msgspec

        files.write(json, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        terminal.say(f"wrote {json}")
