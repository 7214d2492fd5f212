"""`gpudiag ops`, `gpudiag sql`, `gpudiag whatif`: questions to one recording: its op table, its tables by SQL, its steps without a cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from gpudiag.cli import completion, options, terminal
from gpudiag.errors import UsageError
from gpudiag.report import files

_STDOUT = Path("-")

Sort = Literal["time", "calls", "flops", "bytes", "efficiency", "ai"]
GroupBy = Literal["op", "signature", "module", "phase", "kernel"]
BoundName = Literal["compute", "memory", "overhead", "communication", "copy", "unknown"]


def ops(
    path: Annotated[str, options.PATH],
    sort: Annotated[
        Sort, typer.Option(help="Largest first; efficiency: lowest first. ai is FLOP/byte. Unknown values come last.")
    ] = "time",
    group: Annotated[GroupBy, typer.Option(help="Group rows by; signature: an op with the shapes of its tensors.")] = "op",
    top: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Rows to show (default: 20; in CSV and JSON all).", show_default=False),
    ] = None,
    rank: Annotated[int | None, options.RANK_SHOWN] = None,
    phase: Annotated[
        str | None, typer.Option(metavar="PHASE", help="Only ops of this phase: forward, backward, optimizer, data.", show_default=False)
    ] = None,
    bound: Annotated[BoundName | None, typer.Option(help="Only ops with this bound.", show_default=False)] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write CSV to FILE (.csv); - prints it instead of the table.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    graph_capture: Annotated[str | None, options.GRAPH_CAPTURE] = None,
) -> None:
    """List ops by time, with their work and % of roofline."""
    options.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    options.check_captures([] if graph_capture is None else [graph_capture])
    if csv == _STDOUT and as_json:
        raise UsageError("--csv - and --json both print to the standard output", "write the CSV to a file")
    target = None if csv == _STDOUT else csv
    for source in (path, graph_capture):
        options.check_targets([] if target is None or source is None else [target], source or "", (".csv",))
    from gpudiag import api
    from gpudiag.report import op_table

    with terminal.show_progress("reading") as tell:
        found = api.diagnose(path, rank=rank, graph_capture=graph_capture, progress=tell, modules=group == "module").data
    if found.job is not None:
        terminal.write_note(
            f"gpudiag: rank {found.job.shown_rank} of {len(found.job.ranks)}, as `gpudiag report` shows; another one: --rank N"
        )
    table = op_table.build_op_table(found, grouping=group, sorting=sort, phase=phase, bound=bound)
    if as_json:
        terminal.write_result(op_table.encode_op_table_json(table, top).decode())
    elif csv == _STDOUT:
        terminal.write_result(op_table.encode_op_table_csv(table, top))
    else:
        shown = 20 if top is None else top
        terminal.write_document(op_table.build_ops_document(table, shown), wide=True)
    if target is not None:
        files.write_file(target, op_table.encode_op_table_csv(table, top).encode())
        terminal.write_note(f"wrote {target}")


_TABLE_NAMES = "ops, signatures, launches, kernels, frames, marks, allocations, collectives, steps, gaps, idle, syncs, critical_path, step_records, host_marks, telemetry"  # noqa: E501


def sql(
    path: Annotated[str, options.PATH],
    query: Annotated[
        str,
        typer.Argument(
            metavar="QUERY", help=f"One SELECT; without it: list tables and columns. Tables: {_TABLE_NAMES}.", show_default=False
        ),
    ] = "",
    rank: Annotated[int | None, options.RANK] = None,
    window: Annotated[int | None, typer.Option(min=0, metavar="N", help="Window of a bundle.", show_default=False)] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV with every row, not a table.")] = False,
) -> None:
    """Query the tables of a recording with SQL: gpudiag sql PATH "select name, sum(busy_ns) from kernels group by name"."""
    options.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    from gpudiag.queries import list_columns, run_query
    from gpudiag.report.query_result import build_rows_document, join_columns

    if not query:
        columns = list_columns()
        if csv:
            terminal.write_result(columns.write_csv())
        else:
            terminal.write_document(build_rows_document(join_columns(columns)), wide=True)
        return
    with terminal.show_progress("reading") as tell:
        found = run_query(path, query, rank=rank, window=window, progress=tell)
    if csv:
        from gpudiag.report.exports import sanitize_csv

        terminal.write_result(sanitize_csv(found).write_csv())
    else:
        terminal.write_document(build_rows_document(found), wide=True)


def _list_what_ifs(asked: bool) -> None:
    if asked:
        from gpudiag.queries import list_what_ifs
        from gpudiag.report.query_result import build_rows_document

        terminal.write_document(build_rows_document(list_what_ifs()))
        raise typer.Exit


def whatif(
    path: Annotated[str, options.PATH],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change a cost, such as launch=0, roof=0.8, sync=train.py:42 or kernel:NAME=0.5; several are applied together. "
            "Default: each of the standard ones alone.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="Predict the step time on this device of the device table, such as H200 or a100-pcie-80gb, with its error.",
            autocompletion=completion.complete_device,
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--list", is_eager=True, callback=_list_what_ifs, help="List what --set changes, with the values.")
    ] = False,
    rank: Annotated[int | None, options.RANK] = None,
    json: Annotated[Path | None, options.JSON_FILE] = None,
) -> None:
    """Estimate the step time with a cost changed or gone, by replay of the dependency graph."""
    options.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    if json is not None:
        options.check_targets([json], path, (".json",))
    from gpudiag.queries import whatif

    with terminal.show_progress("reading") as tell:
        found = whatif(path, settings or [], device=device, rank=rank, progress=tell)
    terminal.write_document(found.build_document())
    if json is not None:
        files.write_file(json, terminal.format_json(found).encode())
        terminal.write_note(f"wrote {json}")
