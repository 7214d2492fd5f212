"""`gpudiag whatif`: the step time if a cost were gone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpudiag.cli import options, outputs, terminal
from gpudiag.report import files


def whatif(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A trace, a bundle, or a folder of traces, one a rank.")],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A cost to change; several are applied together. launch=0, fused, roof=0.8, loader=0, copies=overlapped, "
            "communication=overlapped, sync=0 (or sync=train.py:42), gc=0, io=0, allocation=0, compile=0, profiler=0, kernel:NAME=0.5, "
            "host=0.5, batch=2. Default: each of the standard ones by itself.",
            show_default=False,
        ),
    ] = None,
    rank: Annotated[int | None, options.RANK] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result to FILE.", show_default=False)] = None,
) -> None:
    """Say how long a step would take if a cost were gone, by a replay of its dependency graph."""
    outputs.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    if json is not None:
        outputs.check_targets([json], path, (".json",))
    from gpudiag.api.whatif import what_ifs
    from gpudiag.report.whatif import render

    with terminal.progress("reading") as tell:
        found = what_ifs(path, settings or [], rank=rank, progress=tell)
    terminal.out(render(found.what_ifs, found.trust, reason=found.reason, width=terminal.columns(), color=terminal.coloured()))
    if json is not None:
        import msgspec

        files.write(json, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        terminal.say(f"wrote {json}")
