"""`gpudiag sql`: a query over the tables of a trace or bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpudiag.cli import options, outputs, terminal

if TYPE_CHECKING:
    import polars as pl

MOST_ROWS = 100
"""Rows of a table in the terminal; --csv has no limit."""
_LONGEST = 400
"""Characters of a cell; --csv has all."""
_NAMES = "ops, signatures, launches, kernels, frames, marks, allocations, collectives, steps, gaps, idle, syncs, critical_path, step_records, host_marks, telemetry"  # noqa: E501


def sql(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A trace, a bundle, or a folder of traces, one a rank.")],
    query: Annotated[
        str,
        typer.Argument(metavar="QUERY", help=f"One SELECT; without it: what can be asked. Tables: {_NAMES}.", show_default=False),
    ] = "",
    rank: Annotated[int | None, options.RANK] = None,
    window: Annotated[int | None, typer.Option(min=0, metavar="N", help="Which window of a bundle.", show_default=False)] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV with every row, not a table.")] = False,
) -> None:
    """Ask the tables of a recording by SQL: gpudiag sql PATH "select name, sum(busy_ns) from kernels group by name"."""
    outputs.check_named("PATH", [path], "give a trace, a bundle, or a folder of ranks")
    from gpudiag.api.sql import columns
    from gpudiag.api.sql import query as ask

    if not query:
        terminal.out(columns().write_csv() if csv else _table(_by_table(columns())))
        return
    with terminal.progress("reading") as tell:
        found = ask(path, query, rank=rank, window=window, progress=tell)
    if csv:
        from gpudiag.report.tablefiles import harmless

        terminal.out(harmless(found).write_csv())
    else:
        terminal.out(_table(found))


def _by_table(found: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each table, with the names of its columns."""
    named = ((name, ", ".join(rows["column"].to_list())) for (name,), rows in found.group_by("table", maintain_order=True))
    return type(found)(list(named), schema=["table", "columns (--csv: with unit and meaning)"], orient="row")


def _table(found: pl.DataFrame) -> str:
    """Return the first rows as a table, and how many there are."""
    from gpudiag.report.console import cells, finished, line, new_console, new_table

    console, sink = new_console(terminal.table_columns(), terminal.coloured())
    table = new_table([(name, "right" if dtype.is_numeric() else "wrapped") for name, dtype in found.schema.items()])
    for row in found.head(MOST_ROWS).iter_rows():
        table.add_row(*cells(*map(_cell, row)))
    table.expand = False  # each column as wide as it needs, the widest give way first
    console.print(table)
    more = f" (the first {MOST_ROWS} are shown; --csv has all)" if found.height > MOST_ROWS else ""
    line(console, f"{found.height:,} row{'' if found.height == 1 else 's'}{more}")
    return finished(sink)


def _cell(value: Any) -> str:
    from gpudiag.report.escape import clean

    if value is None:
        return "null"
    return f"{value:.6g}" if isinstance(value, float) else clean(str(value), _LONGEST)
