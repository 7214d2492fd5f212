"""`gpudiag ops`: the op table of a trace or bundle, summed, sorted and filtered as one likes."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpudiag.cli import options, outputs, terminal
from gpudiag.errors import UsageError
from gpudiag.report import files

if TYPE_CHECKING:
    from gpudiag.report.optable import OpTable

_TOP = 20
_STDOUT = Path("-")


class Sort(str, Enum):
    """What the lines are sorted by."""

    time = "time"
    calls = "calls"
    flops = "flops"
    bytes = "bytes"
    efficiency = "efficiency"
    ai = "ai"


class GroupBy(str, Enum):
    """What one line stands for."""

    op = "op"
    signature = "signature"
    module = "module"
    phase = "phase"
    kernel = "kernel"


class BoundName(str, Enum):
    """What limits an op."""

    compute = "compute"
    memory = "memory"
    overhead = "overhead"
    communication = "communication"
    copy = "copy"
    unknown = "unknown"


def ops(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A trace, a bundle, or a folder of traces, one a rank.")],
    sort: Annotated[
        Sort, typer.Option(help="Largest first; efficiency: lowest first. ai is FLOP/byte. What is not known comes last.")
    ] = Sort.time,
    group: Annotated[GroupBy, typer.Option(help="What one line sums up; signature: an op with the shapes of its tensors.")] = GroupBy.op,
    top: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Lines to show (default: 20; in CSV and JSON all).", show_default=False),
    ] = None,
    rank: Annotated[int | None, options.RANK_SHOWN] = None,
    phase: Annotated[
        str | None, typer.Option(metavar="PHASE", help="Only ops of this phase: forward, backward, optimizer, data.", show_default=False)
    ] = None,
    bound: Annotated[BoundName | None, typer.Option(help="Only ops that this limits.", show_default=False)] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write CSV to FILE (.csv); - prints it instead of the table.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    graph_capture: Annotated[str | None, options.GRAPH_CAPTURE] = None,
) -> None:
    """List the ops with their time, work and distance to the roofline."""
    outputs.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    outputs.check_captures([] if graph_capture is None else [graph_capture])
    target = _target(csv, path, as_json)
    if target is not None and graph_capture is not None:
        outputs.check_targets([target], graph_capture, (".csv",))
    from gpudiag import api
    from gpudiag.report.optable import op_table

    with terminal.progress("reading") as tell:
        by_module = group == GroupBy.module
        found = api.diagnose(path, rank=rank, graph_capture=graph_capture, progress=tell, modules=by_module).data
    if found.job is not None:
        terminal.say(f"gpudiag: rank {found.job.shown_rank} of {len(found.job.ranks)}, as `gpudiag report` shows; another one: --rank N")
    table = op_table(found, grouping=group.value, sorting=sort.value, phase=phase, bound=bound.value if bound else None)
    _print(table, top, as_json=as_json, as_csv=csv == _STDOUT)
    if target is not None:
        from gpudiag.report.opformats import to_csv

        files.write(target, to_csv(table, top).encode())
        terminal.say(f"wrote {target}")


def _target(csv: Path | None, path: str, as_json: bool) -> Path | None:
    """Return the file to write, None where there is none. Raises UsageError or InputError where it cannot be."""
    if csv == _STDOUT and as_json:
        raise UsageError("--csv - and --json both print to the standard output", "write the CSV to a file")
    if csv is None or csv == _STDOUT:
        return None
    outputs.check_targets([csv], path, (".csv",))
    return csv


def _print(table: OpTable, top: int | None, *, as_json: bool, as_csv: bool) -> None:
    from gpudiag.report import opformats

    if as_json:
        terminal.out(opformats.to_json(table, top).decode())
    elif as_csv:
        terminal.out(opformats.to_csv(table, top))
    else:
        shown = _TOP if top is None else top
        terminal.out(opformats.text(table, width=terminal.table_columns(), top=shown, color=terminal.coloured()))
