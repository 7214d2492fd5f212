"""Tables of the HTML page: ops, kernels, idle time, syncs, collectives, telemetry, rules."""

from __future__ import annotations

from gpudiag.facts.event_labels import describe_event, format_kernel_name
from gpudiag.model.finding import RuleOutcome
from gpudiag.model.report import CollectiveRow, IdleRow, KernelRow, ReportData, SyncRow
from gpudiag.report import idle_time, labels, whole_run
from gpudiag.report.console import clean
from gpudiag.report.html import ranks
from gpudiag.report.html.paged_table import (
    CellMakers,
    PagedTable,
    TableCell,
    TableColumn,
    TableRow,
    TableView,
    build_count_cell,
    build_name_cell,
    build_number_cell,
    build_share_cell,
    build_time_cell,
    build_view,
    clean_details,
    tabulate,
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
_OVER_ROOF_CAUSES = {
    "cache": "data in the cache", "inner_cache": "data in the cores' caches", "algorithm": "fast algorithm",
    "unexplained": "wrong peak or count",
}  # fmt: skip
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
        beaten = "" if labels.compute_over_roof(row) is None else _OVER_ROOF_CAUSES.get(row.over_roof_cause or "", "")
        cells = (
            TableCell(clean(name(row), 160), details=clean_details(detail, format_site(row.where), format_recompute(row))),
            build_name_cell(format_phase(row)),
            build_count_cell(row.count),
            build_time_cell(row.kernel_ns),
            build_share_cell(row.kernel_ns / total if total else None),
            TableCell(row.bound),
            TableCell(labels.format_efficiency(row), efficiency, clean_details(beaten)),
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
    wall, order = report.breakdown.wall_ns, {"fired": 0, "error": 1, "suppressed": 2, "not_applicable": 3, "passed": 4}
    words = {"not_applicable": "not applicable", "error": "failed"}
    idle: CellMakers[IdleRow] = {
        TableColumn("cause"): lambda row: build_name_cell(labels.name_bucket(row.cause, report).removeprefix("idle: ")),
        TableColumn("what happened", False, "the event that shows the cause, and the op"): lambda row: TableCell(
            clean(describe_event(row.evidence or "", row.notice) or "unknown", 160), details=clean_details(row.op or "")
        ),
        TableColumn("call site"): lambda row: build_name_cell(idle_time.format_row_site(row)),
        TableColumn("gaps", True): lambda row: build_count_cell(row.count),
        TableColumn("idle time", True): lambda row: build_time_cell(row.idle_ns),
        TableColumn(f"share of the {labels.name_span(report)}", True): lambda row: build_share_cell(row.idle_ns / wall if wall else None),
    }
    rules: CellMakers[RuleOutcome] = {
        TableColumn("rule"): lambda rule: build_name_cell(rule.id, 60),
        TableColumn("status"): lambda rule: TableCell(words.get(rule.status, rule.status)),
        TableColumn("reason"): lambda rule: build_name_cell(rule.reason, 400),
    }
    tables = [
        build_ops_table(report),
        tabulate("kernels", _KERNELS, sorted(report.kernels, key=lambda row: -row.kernel_ns)),
        tabulate("idle", idle, sorted(report.idle, key=lambda row: -row.idle_ns)),
        tabulate("syncs", _SYNCS, sorted(report.syncs, key=lambda row: (-row.cost_ns, -row.wall_ns))),
        tabulate("collectives", _COLLECTIVES, sorted(report.collectives, key=lambda row: -row.kernel_ns)),
        tabulate("telemetry", _TELEMETRY, whole_run.build_telemetry_rows(report.telemetry)),
        tabulate("rules", rules, sorted(report.rules, key=lambda rule: (order[rule.status], rule.id))),
        *ranks.build_rank_tables(report),
    ]
    return {table.id: table for table in tables if table.views[0].rows}


_KERNELS: CellMakers[KernelRow] = {
    TableColumn("kernel"): lambda row: build_name_cell(format_kernel_name(row.name)),
    TableColumn("kind", False, "kernel, copy or memory fill"): lambda row: build_name_cell(row.kind),
    TableColumn("class", False, "kind of work by the kernel's name alone"): lambda row: build_name_cell(
        (row.kernel_class or "").replace("_", " ")
    ),
    TableColumn("calls", True): lambda row: build_count_cell(row.count),
    TableColumn("time", True): lambda row: build_time_cell(row.kernel_ns),
    TableColumn("bound"): lambda row: TableCell(row.bound),
    TableColumn("op", False, "that launched most of its time"): lambda row: build_name_cell(row.op),
}
_SYNCS: CellMakers[SyncRow] = {
    TableColumn("call"): lambda row: TableCell(clean(idle_time.name_call(row), 160), details=clean_details(row.api if row.op else "")),
    TableColumn("call site"): lambda row: build_name_cell(idle_time.format_row_site(row)),
    TableColumn("calls", True): lambda row: build_count_cell(row.count),
    TableColumn("host time", True, "time of the host in the calls"): lambda row: build_time_cell(row.wall_ns),
    TableColumn("waited", True, "part of it in which the work that it waited for still ran"): lambda row: build_time_cell(row.waited_ns),
    TableColumn("exposed", True, "exposed sync time: idle time of the device that the calls cause"): lambda row: build_time_cell(
        row.cost_ns
    ),
}
_COLLECTIVES: CellMakers[CollectiveRow] = {
    TableColumn("collective"): lambda row: build_name_cell(name_collective(row.name)),
    TableColumn("group"): lambda row: build_name_cell(row.group),
    TableColumn("ranks", True): lambda row: build_count_cell(row.size),
    TableColumn("calls", True): lambda row: build_count_cell(row.count),
    TableColumn("time", True): lambda row: build_time_cell(row.kernel_ns),
    TableColumn("bytes", True): lambda row: TableCell("?" if row.bytes is None else format_bytes(row.bytes), row.bytes),
    TableColumn("rate", True, "bytes / time, waiting for other ranks included"): lambda row: TableCell(
        "?" if (rate := labels.compute_rate(row.bytes, row.kernel_ns)) is None else format_rate(rate, "B"), rate
    ),
}
_TELEMETRY: CellMakers[whole_run.TelemetryRow] = {
    TableColumn("sampled"): lambda row: build_name_cell(row.label),
    TableColumn("lowest"): lambda row: TableCell(row.low),
    TableColumn("median", help="weighted by how long each sample holds"): lambda row: TableCell(row.median),
    TableColumn("highest"): lambda row: TableCell(row.high),
}
