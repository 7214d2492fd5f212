"""The tables of the HTML page but those of ops and of ranks: kernels, idle time, waits, collectives, telemetry, rules."""

from __future__ import annotations

from gpudiag.facts.spoken import event_words, kernel_label
from gpudiag.model.report import CollectiveRow, KernelRow, ReportData
from gpudiag.report import telemetry, waiting, words
from gpudiag.report.escape import clean
from gpudiag.report.html import ops, ranks
from gpudiag.report.html.table import Cell, Column, Table, count_cell, name_cell, share_cell, table_of, time_cell, told
from gpudiag.report.labels import collective_label
from gpudiag.units import format_bytes, format_rate


def tables(report: ReportData) -> dict[str, Table]:
    """Return the tables that have rows, by id."""
    made = [ops.table(report), _kernels(report), _idle(report), _syncs(report), _collectives(report), _telemetry(report), _rules(report)]
    made += ranks.tables(report)
    return {table.id: table for table in made if table.first.rows}


def _kernels(report: ReportData) -> Table:
    columns = (
        Column("kernel"),
        Column("kind", False, "kernel, copy or memory fill"),
        Column("class", False, "kind of work by the kernel's name alone"),
        Column("calls", True),
        Column("time", True),
        Column("bound"),
        Column("op", False, "that launched most of its time"),
    )
    rows = sorted(report.kernels, key=lambda row: -row.kernel_ns)
    return table_of("kernels", columns, [_kernel(row) for row in rows])


def _kernel(row: KernelRow) -> tuple[Cell, ...]:
    name, kind = name_cell(kernel_label(row.name)), name_cell(row.kind)
    known = name_cell((row.kernel_class or "").replace("_", " "))
    return name, kind, known, count_cell(row.count), time_cell(row.kernel_ns), Cell(row.bound), name_cell(row.op)


def _idle(report: ReportData) -> Table:
    columns = (
        Column("cause"),
        Column("what happened", False, "the event that shows the cause, and the op"),
        Column("at"),
        Column("gaps", True),
        Column("idle time", True),
        Column(f"share of the {words.span_word(report)}", True),
    )
    wall = report.breakdown.wall_ns
    rows = sorted(report.idle, key=lambda row: -row.idle_ns)
    cells = [
        (
            name_cell(words.bucket_label(row.cause, report).removeprefix("idle: ")),
            Cell(clean(event_words(row.evidence or "") or "not known", 160), details=told(row.op or "")),
            name_cell(waiting.site(row)),
            count_cell(row.count),
            time_cell(row.idle_ns),
            share_cell(row.idle_ns / wall if wall else None),
        )
        for row in rows
    ]
    return table_of("idle", columns, cells)


def _syncs(report: ReportData) -> Table:
    columns = (
        Column("call"),
        Column("at"),
        Column("calls", True),
        Column("inside", True, "time of the host in the calls"),
        Column("waited", True, "part of it in which the work that it waited for still ran"),
        Column("idle after", True, "idle time of the device that the calls caused: what they really cost"),
    )
    rows = sorted(report.syncs, key=lambda row: (-row.cost_ns, -row.wall_ns))
    cells = [
        (
            Cell(clean(waiting.call_name(row), 160), details=told(row.api if row.op else "")),
            name_cell(waiting.site(row)),
            count_cell(row.count),
            time_cell(row.wall_ns),
            time_cell(row.waited_ns),
            time_cell(row.cost_ns),
        )
        for row in rows
    ]
    return table_of("syncs", columns, cells)


def _collectives(report: ReportData) -> Table:
    columns = (
        Column("collective"),
        Column("group"),
        Column("ranks", True),
        Column("calls", True),
        Column("time", True),
        Column("bytes", True),
        Column("rate", True, "bytes / time, waiting for other ranks included"),
    )
    rows = sorted(report.collectives, key=lambda row: -row.kernel_ns)
    return table_of("collectives", columns, [_collective(row) for row in rows])


def _collective(row: CollectiveRow) -> tuple[Cell, ...]:
    rate = words.per_second(row.bytes, row.kernel_ns)
    size = Cell("?" if row.bytes is None else format_bytes(row.bytes), row.bytes)
    speed = Cell("?" if rate is None else format_rate(rate, "B"), rate)
    return (
        name_cell(collective_label(row.name)),
        name_cell(row.group),
        count_cell(row.size),
        count_cell(row.count),
        time_cell(row.kernel_ns),
        size,
        speed,
    )


def _telemetry(report: ReportData) -> Table:
    columns = (Column("sampled"), Column("lowest"), Column("median", help="weighted by how long each sample holds"), Column("highest"))
    cells = [(name_cell(row.label), Cell(row.low), Cell(row.median), Cell(row.high)) for row in telemetry.rows(report)]
    return table_of("telemetry", columns, cells)


def _rules(report: ReportData) -> Table:
    columns = (Column("rule"), Column("status"), Column("reason"))
    order = {"fired": 0, "error": 1, "suppressed": 2, "not_applicable": 3, "passed": 4}
    shown = {"not_applicable": "could not be judged", "suppressed": "withheld", "error": "failed"}
    rows = sorted(report.rules, key=lambda rule: (order[rule.status], rule.id))
    cells = [(name_cell(rule.id, 60), Cell(shown.get(rule.status, rule.status)), name_cell(rule.reason, 400)) for rule in rows]
    return table_of("rules", columns, cells)
