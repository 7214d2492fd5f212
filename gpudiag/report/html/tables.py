"""Tables of the HTML page: ops, kernels, idle time, syncs, collectives, telemetry, rules."""

from __future__ import annotations

from gpudiag.facts.event_labels import describe_event, format_kernel_name
from gpudiag.model.report import ReportData
from gpudiag.report import idle_time, labels, whole_run
from gpudiag.report.console import clean
from gpudiag.report.html import ranks
from gpudiag.report.html.paged_table import (
    PagedTable,
    TableCell,
    TableColumn,
    TableRow,
    TableView,
    build_count_cell,
    build_name_cell,
    build_number_cell,
    build_share_cell,
    build_table,
    build_time_cell,
    build_view,
    clean_details,
)
from gpudiag.report.html.roofline import sort_ops_by_time
from gpudiag.report.labels import build_op_namer, format_phase, format_recompute, format_site, name_collective
from gpudiag.report.op_table import Grouping, build_op_table, format_group_efficiency
from gpudiag.units import format_bytes, format_rate

_NAME_COLUMN = TableColumn(
    "op", False, "with the shapes of its tensors, and the function that calls it (for a backward op: its forward op)"
)
_TIME_COLUMNS = (
    TableColumn("calls", True),
    TableColumn("time", True, "summed time of its kernels"),
    TableColumn("share", True, "of the time of all ops"),
    TableColumn("bound", False, "what limits most of its time"),
    TableColumn("of roofline", True, "roofline time / measured time"),
)
_COST_COLUMN = TableColumn(
    "cost",
    False,
    "where FLOPs and bytes come from: exact formula, derived, generic, or none; the peak judged against; waves of thread blocks "
    "(below 1, parts of the device stay empty) and estimated occupancy",
)
_GROUPS: tuple[tuple[Grouping, TableColumn], ...] = (
    ("op", TableColumn("op", False, "all shapes and modules together")),
    ("module", TableColumn("module")),
    ("phase", TableColumn("phase")),
)


def build_ops_table(report: ReportData) -> PagedTable:
    """Return the op table with its views; by module and by phase where more than one of them is known."""
    flop, byte = labels.choose_op_units(report)
    rates = (
        TableColumn(flop[0], True, "achieved"),
        TableColumn(byte[0], True, "achieved, compulsory traffic"),
        TableColumn("FLOP/B", True, "arithmetic intensity"),
    )
    total, name = labels.sum_op_ns(report.ops), build_op_namer(report)
    rows = []
    for row in sort_ops_by_time(report):
        detail = " ".join(text for text in (row.module, row.signature) if text)
        waves = "" if row.waves is None else f"{labels.format_number(row.waves)} waves"
        occupancy = "" if row.occupancy is None else f"{labels.format_number(row.occupancy, 100, ' %')} occupied"
        launch = (f"{row.engine} peak" if row.engine else "", ", ".join(text for text in (waves, occupancy) if text))
        efficiency = labels.compute_over_roof(row) or row.efficiency
        cells = (
            TableCell(clean(name(row), 160), details=clean_details(detail, format_site(row.where), format_recompute(row))),
            build_name_cell(format_phase(row)),
            build_count_cell(row.count),
            build_time_cell(row.kernel_ns),
            build_share_cell(row.kernel_ns / total if total else None),
            TableCell(row.bound),
            TableCell(labels.format_efficiency(row), efficiency, clean_details(labels.explain_over_roof(row))),
            build_number_cell(labels.compute_rate(row.flops, row.kernel_ns), flop[1]),
            build_number_cell(labels.compute_rate(row.bytes, row.kernel_ns), byte[1]),
            build_number_cell(labels.compute_intensity(row)),
            TableCell(row.provenance, details=clean_details(*launch)),
        )
        keys = {"op": row.name, "module": row.module, "phase": format_phase(row)}
        rows.append(TableRow(cells, {key: clean(text, 160) for key, text in keys.items() if text}))
    views = [build_view((_NAME_COLUMN, TableColumn("phase"), *_TIME_COLUMNS, *rates, _COST_COLUMN), rows, label="op and shapes")]
    for key, column in _GROUPS if len(report.ops) > 1 else ():
        if any(row.name if key == "op" else row.module if key == "module" else format_phase(row) for row in report.ops):
            views.append(_build_group_view(report, key, column, rates, (flop[1], byte[1])))
    return PagedTable("ops", tuple(views))


def _build_group_view(
    report: ReportData, grouping: Grouping, column: TableColumn, rates: tuple[TableColumn, ...], factors: tuple[float, float]
) -> TableView:
    """Return the ops summed by one key; `factors`: from FLOP/s and B/s to the units of `rates`."""
    rows = []
    for group in build_op_table(report, grouping=grouping).groups:
        judged = group.judged_share
        partly = labels.ROUNDS_TO_ZERO <= judged < 1 - labels.ROUNDS_TO_ZERO
        part = clean_details(f"of {labels.format_number(judged, 100, ' %')} of it") if partly else ()
        cells = (
            build_name_cell(group.name),
            build_count_cell(group.rows),
            build_count_cell(group.calls),
            build_time_cell(group.kernel_ns),
            build_share_cell(group.share),
            TableCell(group.bound),
            TableCell(format_group_efficiency(group), group.efficiency, part),
            build_number_cell(labels.compute_rate(group.flops.value, group.flops.ns), factors[0]),
            build_number_cell(labels.compute_rate(group.bytes.value, group.bytes.ns), factors[1]),
            build_number_cell(group.intensity),
        )
        known = {"op": group.op, "module": group.module, "phase": group.phase}.get(grouping)
        rows.append(TableRow(cells, {grouping: clean(group.name, 160)} if known else {}))
    return build_view((column, TableColumn("rows", True, "ops with shapes in it"), *_TIME_COLUMNS, *rates), rows, grouping, grouping)


def build_tables(report: ReportData) -> dict[str, PagedTable]:
    """Return the tables that have rows, by id."""
    sampled = (
        TableColumn("sampled"),
        TableColumn("lowest"),
        TableColumn("median", help="weighted by how long each sample holds"),
        TableColumn("highest"),
    )
    ranges = [
        (build_name_cell(row.label), TableCell(row.low), TableCell(row.median), TableCell(row.high))
        for row in whole_run.build_telemetry_rows(report.telemetry)
    ]
    order = {"fired": 0, "error": 1, "suppressed": 2, "not_applicable": 3, "passed": 4}
    words = {"not_applicable": "not applicable", "error": "failed"}
    rules = [
        (build_name_cell(rule.id, 60), TableCell(words.get(rule.status, rule.status)), build_name_cell(rule.reason, 400))
        for rule in sorted(report.rules, key=lambda rule: (order[rule.status], rule.id))
    ]
    tables = [
        build_ops_table(report),
        _build_kernels_table(report),
        _build_idle_table(report),
        _build_syncs_table(report),
        _build_collectives_table(report),
        build_table("telemetry", sampled, ranges),
        build_table("rules", (TableColumn("rule"), TableColumn("status"), TableColumn("reason")), rules),
        *ranks.build_rank_tables(report),
    ]
    return {table.id: table for table in tables if table.views[0].rows}


def _build_kernels_table(report: ReportData) -> PagedTable:
    columns = (
        TableColumn("kernel"),
        TableColumn("kind", False, "kernel, copy or memory fill"),
        TableColumn("class", False, "kind of work by the kernel's name alone"),
        TableColumn("calls", True),
        TableColumn("time", True),
        TableColumn("bound"),
        TableColumn("op", False, "that launched most of its time"),
    )
    cells = [
        (
            build_name_cell(format_kernel_name(row.name)),
            build_name_cell(row.kind),
            build_name_cell((row.kernel_class or "").replace("_", " ")),
            build_count_cell(row.count),
            build_time_cell(row.kernel_ns),
            TableCell(row.bound),
            build_name_cell(row.op),
        )
        for row in sorted(report.kernels, key=lambda row: -row.kernel_ns)
    ]
    return build_table("kernels", columns, cells)


def _build_idle_table(report: ReportData) -> PagedTable:
    columns = (
        TableColumn("cause"),
        TableColumn("what happened", False, "the event that shows the cause, and the op"),
        TableColumn("call site"),
        TableColumn("gaps", True),
        TableColumn("idle time", True),
        TableColumn(f"share of the {labels.name_span(report)}", True),
    )
    wall = report.breakdown.wall_ns
    rows = sorted(report.idle, key=lambda row: -row.idle_ns)
    cells = [
        (
            build_name_cell(labels.name_bucket(row.cause, report).removeprefix("idle: ")),
            TableCell(clean(describe_event(row.evidence or "", row.notice) or "unknown", 160), details=clean_details(row.op or "")),
            build_name_cell(idle_time.format_row_site(row)),
            build_count_cell(row.count),
            build_time_cell(row.idle_ns),
            build_share_cell(row.idle_ns / wall if wall else None),
        )
        for row in rows
    ]
    return build_table("idle", columns, cells)


def _build_syncs_table(report: ReportData) -> PagedTable:
    columns = (
        TableColumn("call"),
        TableColumn("call site"),
        TableColumn("calls", True),
        TableColumn("host time", True, "time of the host in the calls"),
        TableColumn("waited", True, "part of it in which the work that it waited for still ran"),
        TableColumn("exposed", True, "exposed sync time: idle time of the device that the calls cause"),
    )
    rows = sorted(report.syncs, key=lambda row: (-row.cost_ns, -row.wall_ns))
    cells = [
        (
            TableCell(clean(idle_time.name_call(row), 160), details=clean_details(row.api if row.op else "")),
            build_name_cell(idle_time.format_row_site(row)),
            build_count_cell(row.count),
            build_time_cell(row.wall_ns),
            build_time_cell(row.waited_ns),
            build_time_cell(row.cost_ns),
        )
        for row in rows
    ]
    return build_table("syncs", columns, cells)


def _build_collectives_table(report: ReportData) -> PagedTable:
    columns = (
        TableColumn("collective"),
        TableColumn("group"),
        TableColumn("ranks", True),
        TableColumn("calls", True),
        TableColumn("time", True),
        TableColumn("bytes", True),
        TableColumn("rate", True, "bytes / time, waiting for other ranks included"),
    )
    cells = []
    for row in sorted(report.collectives, key=lambda row: -row.kernel_ns):
        rate = labels.compute_rate(row.bytes, row.kernel_ns)
        cells.append(
            (
                build_name_cell(name_collective(row.name)),
                build_name_cell(row.group),
                build_count_cell(row.size),
                build_count_cell(row.count),
                build_time_cell(row.kernel_ns),
                TableCell("?" if row.bytes is None else format_bytes(row.bytes), row.bytes),
                TableCell("?" if rate is None else format_rate(rate, "B"), rate),
            )
        )
    return build_table("collectives", columns, cells)
