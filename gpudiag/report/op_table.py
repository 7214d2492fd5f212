"""The op table: rows filtered, grouped and sorted; as text, CSV and JSON.

Sums over rows of which some are not known are sums over the known ones, beside the time that they stand for: a rate divides the known
work by the known rows' time, an efficiency the known roofline times by the same rows' measured times.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from gpudiag.errors import InputError, UsageError
from gpudiag.model.event_labels import format_kernel_name
from gpudiag.model.ops import BOUNDS, Bound, Provenance
from gpudiag.model.report import CollectiveRow, KernelRow, OpRow, ReportData
from gpudiag.report import labels
from gpudiag.report.blocks import (
    PAGES,
    Amount,
    Cell,
    Column,
    Document,
    Paragraph,
    Row,
    Section,
    Table,
    build_count_cell,
    build_row,
    build_share_cell,
    build_time_cell,
    say_all,
)
from gpudiag.report.console import clean
from gpudiag.report.labels import build_op_namer, format_phase, format_recompute, format_site, name_collective
from gpudiag.units import format_bytes, format_flop, format_ns, format_rate, format_share

Grouping = Literal["op", "signature", "module", "phase", "kernel"]
Sorting = Literal["time", "calls", "flops", "bytes", "efficiency", "ai"]

_RECORD_MODULES = "modules come from Python stacks: record with gpudiag.profile, or with torch.profiler.profile(with_stack=True)"
_NOT_NAMED = "(unknown)"
_Row = TypeVar("_Row", OpRow, KernelRow)


class KnownSum(msgspec.Struct, frozen=True):
    """A sum over the rows whose value is known (None: over none), and the kernel time of those rows in ns."""

    value: float | None
    ns: int


class OpGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the op table. Keys that are not grouped by are null where they differ within the group."""

    name: str
    op: str | None = None
    signature: str | None = None
    module: str | None = None
    phase: str | None = None
    dtype: str | None = None
    engine: str | None = None
    provenance: Provenance | None = None
    kernel_class: str | None = None
    rows: int
    calls: int
    kernel_ns: int
    share: float | None
    """Of the time of all ops of the report, before any filter."""
    flops: KnownSum = KnownSum(None, 0)
    bytes: KnownSum = KnownSum(None, 0)
    intensity: float | None = None
    t_roof: KnownSum = KnownSum(None, 0)
    """Roofline time in ns, without rows that beat their roof."""
    efficiency: float | None = None
    """t_roof / time of the same rows."""
    over_roof_cause: str | None = None
    over_roof_ns: int = 0
    """Time of rows that are faster than their roof: the peak or a count is wrong, so they have no efficiency."""
    bound: Bound
    bound_ns: dict[Bound, int]
    recompute_ns: int = 0
    guessed_ns: int = 0
    """Time of rows whose cost is generic: a guess by the sizes of all arguments."""
    occupancy: float | None = None
    """'est. achieved occupancy' 0..1, mean over the time of rows with a record."""
    waves: float | None = None
    """Waves of thread blocks, mean over the time of rows with a record."""

    @property
    def judged_share(self) -> float:
        """Return the share of the group's time that `efficiency` speaks of."""
        return self.t_roof.ns / self.kernel_ns if self.kernel_ns else 0.0


class OpTable(msgspec.Struct, frozen=True):
    """The groups in order, with how they were made."""

    grouping: Grouping
    sorting: Sorting
    groups: tuple[OpGroup, ...]
    total_ns: int
    """Time of all rows of the report, before any filter."""
    cut: int = 0
    """Rows of which the report keeps the largest alone (kernel names); 0: it keeps all."""


def build_op_table(
    report: ReportData, *, grouping: Grouping = "op", sorting: Sorting = "time", phase: str | None = None, bound: Bound | None = None
) -> OpTable:
    """Return the rows of `report` that pass the filters, summed by group and sorted.

    Raises InputError where the recording does not hold what is asked for, UsageError where the question makes no sense.
    """
    if grouping == "kernel":
        return _build_kernel_table(report, sorting, phase, bound)
    rows = select_ops(report, phase, bound)
    if grouping == "module" and rows and all(row.module is None for row in rows):
        raise InputError("no op of this recording is attributed to an nn.Module", _RECORD_MODULES)
    namers: dict[str, Callable[[OpRow], str]] = {
        "op": lambda row: row.name,
        "signature": build_op_namer(report),
        "module": lambda row: row.module or _NOT_NAMED,
        "phase": lambda row: format_phase(row) or _NOT_NAMED,
    }
    total, name = labels.sum_op_ns(report.ops), namers[grouping]
    groups = [build_op_group(name(members[0]), members, total) for members in _gather_rows(rows, _KEYS[grouping])]
    return OpTable(grouping, sorting, tuple(sort_groups(groups, sorting)), total)


def select_ops(report: ReportData, phase: str | None = None, bound: Bound | None = None) -> list[OpRow]:
    """Return the ops that pass the filters. Raises InputError for a phase that the recording does not know."""
    rows = list(report.ops)
    if phase is not None and rows:
        known = sorted({format_phase(row) for row in rows if row.phase})
        if phase not in known:
            raise InputError(f"no op has the phase {phase!r}", f"phases of this recording: {', '.join(known) or 'none is known'}")
        rows = [row for row in rows if format_phase(row) == phase]
    return [row for row in rows if bound in (None, row.bound)]


_KEYS: dict[str, Callable[[OpRow], tuple[str | None, ...]]] = {
    "op": lambda row: (row.name,),
    "signature": lambda row: (row.name, row.signature),
    "module": lambda row: (row.module,),
    "phase": lambda row: (row.phase,),
}


def _gather_rows(rows: Iterable[_Row], key: Callable[[_Row], tuple[str | None, ...]]) -> list[list[_Row]]:
    found: dict[tuple[str | None, ...], list[_Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.values())


def build_op_group(name: str, rows: list[OpRow], total_ns: int) -> OpGroup:
    """Return the sums over rows of ops; `total_ns`: of all ops, for the share."""
    time = labels.sum_op_ns(rows)
    judged = [row for row in rows if labels.compute_over_roof(row) is None]
    roof = _sum_known(judged, lambda row: row.t_roof_ns)
    both = [row for row in rows if row.flops is not None and row.bytes is not None]
    moved = sum(row.bytes or 0.0 for row in both)
    # A row that does not say how its time splits counts as its main bound
    sums = {bound: sum((row.bound_ns or {row.bound: row.kernel_ns}).get(bound, 0) for row in rows) for bound in BOUNDS}
    bound_ns: dict[Bound, int] = {bound: ns for bound, ns in sums.items() if ns} or {rows[0].bound: 0}
    keys = ("signature", "module", "phase", "dtype", "engine", "provenance")
    return OpGroup(
        name=name,
        op=_find_common_value(row.name for row in rows),
        **{key: _find_common_value(getattr(row, key) for row in rows) for key in keys},
        rows=len(rows),
        calls=sum(row.count for row in rows),
        kernel_ns=time,
        share=time / total_ns if total_ns else None,
        flops=_sum_known(rows, lambda row: row.flops),
        bytes=_sum_known(rows, lambda row: row.bytes),
        intensity=sum(row.flops or 0.0 for row in both) / moved if moved else None,
        t_roof=roof,
        efficiency=roof.value / roof.ns if roof.value is not None and roof.ns else None,
        over_roof_cause=_find_common_value(row.over_roof_cause for row in rows),
        over_roof_ns=time - labels.sum_op_ns(judged),
        bound=max(bound_ns, key=bound_ns.__getitem__),
        bound_ns=bound_ns,
        recompute_ns=sum(row.recompute_ns for row in rows),
        guessed_ns=labels.sum_op_ns([row for row in rows if labels.is_guess(row)]),
        occupancy=_average_known(rows, lambda row: row.occupancy),
        waves=_average_known(rows, lambda row: row.waves),
    )


_Value = TypeVar("_Value", bound=str)


def _find_common_value(values: Iterable[_Value | None]) -> _Value | None:
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _sum_known(rows: Iterable[OpRow], value: Callable[[OpRow], float | None]) -> KnownSum:
    found = [(number, row.kernel_ns) for row in rows if (number := value(row)) is not None]
    return KnownSum(sum(number for number, _ in found) if found else None, sum(ns for _, ns in found))


def _average_known(rows: Iterable[OpRow], value: Callable[[OpRow], float | None]) -> float | None:
    found = [(number, row.kernel_ns) for row in rows if (number := value(row)) is not None]
    total = sum(ns for _, ns in found)
    return sum(number * ns for number, ns in found) / total if total else None


def _build_kernel_table(report: ReportData, sorting: Sorting, phase: str | None, bound: Bound | None) -> OpTable:
    if sorting not in ("time", "calls"):
        raise UsageError(f"kernels cannot be sorted by {sorting}: work is modelled by op, not by kernel", "use --sort time or calls")
    if phase is not None:
        raise UsageError("kernels have no phase", "leave --phase or --group kernel out")
    if not report.kernels and report.ops:
        raise InputError("this run has no kernels: the device is the CPU, which runs ops", "use --group op")
    total = sum(row.kernel_ns for row in report.kernels)
    groups = []
    for rows in _gather_rows([row for row in report.kernels if bound in (None, row.bound)], lambda row: (row.name,)):
        time = sum(row.kernel_ns for row in rows)
        bound_ns = {one: sum(row.kernel_ns for row in rows if row.bound == one) for one in BOUNDS if any(row.bound == one for row in rows)}
        group = OpGroup(
            name=rows[0].name,
            op=max(rows, key=lambda row: row.kernel_ns).op,
            kernel_class=_find_common_value(row.kernel_class for row in rows),
            rows=len(rows),
            calls=sum(row.count for row in rows),
            kernel_ns=time,
            share=time / total if total else None,
            bound=max(bound_ns, key=bound_ns.__getitem__),
            bound_ns=bound_ns,
        )
        groups.append(group)
    cut = len(report.kernels) if sum(row.count for row in report.kernels) < report.trust.kernels else 0
    return OpTable("kernel", sorting, tuple(sort_groups(groups, sorting)), total, cut)


def sort_groups(groups: Iterable[OpGroup], sorting: Sorting) -> list[OpGroup]:
    """Return groups in the order of a table: what is not known comes last."""
    values: dict[str, Callable[[OpGroup], float | None]] = {
        "time": lambda group: group.kernel_ns,
        "calls": lambda group: group.calls,
        "flops": lambda group: group.flops.value,
        "bytes": lambda group: group.bytes.value,
        "efficiency": lambda group: None if group.efficiency is None else -group.efficiency,
        "ai": lambda group: group.intensity,
    }
    known = [(values[sorting](group), group) for group in groups]
    known.sort(key=lambda pair: (pair[0] is None, -(pair[0] or 0.0), -pair[1].kernel_ns, pair[1].name))
    return [group for _, group in known]


LONGEST_NAME = 10_000

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet read a cell as a formula (owasp.org/www-community/attacks/CSV_Injection)."""
_SORTED_BY: dict[str, str] = {"calls": "calls", "flops": "FLOP", "bytes": "bytes", "efficiency": "of roofline", "ai": "FLOP/B"}
"""Title of the column that shows what a table is sorted by, whatever the width."""
_TITLES: dict[Grouping, str] = {"op": "op", "signature": "op", "module": "module", "phase": "phase", "kernel": "kernel"}
_OVER_ROOF_CAUSES = {
    "cache": "data in the cache", "inner_cache": "data in the cores' caches", "algorithm": "fast algorithm",
    "unexplained": "wrong peak or count",
}  # fmt: skip
_BESIDE = 150
"""Columns from which call site and shapes stand beside the figures: an op then takes one line."""


def build_ops_section(report: ReportData, amount: Amount, chosen: Sequence[OpRow] | None = None) -> Section | None:
    """Return the ops by time, each with its shapes; on pages grouped by op, module and phase too. `chosen`: among these (default: all)."""
    table = build_ops_table(report, amount, chosen)
    if table is None:
        return None
    count, rows = report.steps.count, sort_ops_by_time(report, chosen)[: max(0, amount.ops)]
    span = ("1 step" if count == 1 else f"{count} steps") if labels.has_steps(report) else "the recorded window"
    note = f"calls and times are sums over {span}" if amount.page else f"{len(rows)} of {len(report.ops)}; sums over {span}"
    legend = [f"{text}." for text in labels.format_op_legend(rows)]
    return Section("Top ops by time", (table, *say_all(legend, "quiet")), "ops-title", note, "Ops")


def sort_ops_by_time(report: ReportData, chosen: Sequence[OpRow] | None = None) -> list[OpRow]:
    """Return the ops (`chosen`: these of them) in the order of their table: by time, largest first."""
    return sorted(report.ops if chosen is None else chosen, key=lambda row: -row.kernel_ns)


def build_ops_table(report: ReportData, amount: Amount, chosen: Sequence[OpRow] | None = None) -> Table | None:
    """Return the largest ops, each with its shapes, and on pages their sums by op, module and phase; None where there are none.

    `chosen`: among these (default: all); shares are of the time of all.
    """
    rows = sort_ops_by_time(report, chosen)[: max(0, amount.ops)]
    if not rows:
        return None
    total, name = labels.sum_op_ns(report.ops), build_op_namer(report)
    groups = []
    for row in rows:
        efficiency = row.efficiency if labels.compute_over_roof(row) is None else None  # as judged, where that is known
        groups.append(msgspec.structs.replace(build_op_group(name(row), [row], total), efficiency=efficiency))
    table = build_group_table(OpTable("signature", "time", tuple(groups), total))
    kept = [k for k, column in enumerate(table.columns) if column.page and (amount.page or column.title not in ("rows", "cost"))]
    made = []
    for row, line in zip(rows, table.rows, strict=True):
        detail, phase = labels.format_op_detail(row), format_phase(row)
        told = (" ".join(text for text in (row.module, row.signature) if text), format_site(row.where), phase, format_recompute(row))
        called = line.cells[0].text if detail or not phase or amount.page else f"{line.cells[0].text}, {phase}"
        first = Cell(called, details=told if amount.page else (), link=("op", row.name))
        keys = {key: text for key, text in (("op", row.name), ("module", row.module), ("phase", phase)) if text}
        made.append(Row((first, *(line.cells[k] for k in kept[1:])), "" if amount.page else detail, keys=keys))
    views: list[Table] = []
    known: tuple[tuple[Grouping, bool], ...] = (
        ("op", True), ("module", any(row.module for row in rows)), ("phase", any(row.phase for row in rows))
    )  # fmt: skip
    for grouping, told_apart in known if amount.page and len(rows) > 1 else ():
        if told_apart:
            views.append(build_group_table(build_op_table(report, grouping=grouping), report=report))
    meaning = "with the shapes of its tensors, and the function that calls it (for a backward op: its forward op)"
    columns = (Column("op", "name", meaning), *(table.columns[k] for k in kept[1:]))
    return Table(
        columns, tuple(made), "Top ops by time; the column titles sort", "ops", "op and shapes", tuple(views), beside=_BESIDE,
        beside_title="call site, shapes", wide=True,
    )  # fmt: skip


def _build_number_cell(value: float | None, factor: float = 1, unit: str = "") -> Cell:
    return Cell(labels.format_number(value, factor, unit), value)


def build_ops_document(table: OpTable, top: int = 20) -> Document:
    """Return the first `top` groups, what was left out, and the words in the table that are no figures."""
    groups = table.groups[:top]
    if not groups:
        return Document("gpudiag ops", "", leads=(Paragraph("No op passes these filters."),))
    notes = [f"{len(groups)} of {len(table.groups)} rows; --top N shows more"] if len(groups) < len(table.groups) else []
    if table.cut:
        notes.append(f"the {table.cut:,} kernel names with the most time; shares are of their time")
    if table.grouping != "kernel":
        total = sum(group.kernel_ns for group in table.groups)
        judged = sum(group.t_roof.ns for group in table.groups)
        if judged and judged < total * (1 - labels.ROUNDS_TO_ZERO):
            notes.append(f"of roofline: over the time whose roofline is known, {format_share(judged / total)} of these ops' time")
        if over := sum(group.over_roof_ns for group in table.groups):
            notes.append(f"{labels.OVER_ROOF_LEGEND}: {format_ns(over)} in all, left out of the efficiencies")
        if any(format_group_efficiency(group).startswith("~") for group in groups):
            notes.append(labels.GUESS_LEGEND)
        if any(group.efficiency is None and not group.over_roof_ns for group in groups):
            notes.append(labels.UNKNOWN_LEGEND)
    return Document("gpudiag ops", "", leads=(build_group_table(table, groups), *say_all(notes, "quiet")))


def build_group_table(table: OpTable, chosen: Sequence[OpGroup] | None = None, report: ReportData | None = None) -> Table:
    """Return groups (default: all) as a table; rates in the units of `report` where it stands beside another table of it."""
    groups = table.groups if chosen is None else chosen
    name = Column(_TITLES[table.grouping], "path" if table.grouping == "module" else "name")
    if table.grouping == "kernel":
        columns = [name, *_SHARED_COLUMNS, Column("class", least=100), Column("op", least=120, help="launched most of its time")]
        rows = [
            _build_group_row(table, group, Cell((group.kernel_class or "").replace("_", " ")), Cell(group.op or "", link=_link_op(group)))
            for group in groups
        ]
        return Table(tuple(columns), tuple(rows), "Kernels by time", "kernel", "kernel", wide=True)
    rates = ([_compute_rate(known) for known in sums] for sums in ([g.flops for g in groups], [g.bytes for g in groups]))
    times = [group.kernel_ns for group in groups]
    flop, byte = labels.choose_op_units(report) if report else (
        labels.choose_rate_unit(unit, list(zip(found, times, strict=True))) for unit, found in zip(("FLOP/s", "B/s"), rates, strict=True)
    )  # fmt: skip
    partial = any(_is_partial(group) for group in groups)
    columns = [
        name, *_SHARED_COLUMNS,
        Column("of roofline", "number", "roofline time / measured time"),
        Column("judged", "number", least=60 if partial else 145, page=False),
        Column("FLOP", "number", least=PAGES, page=False),
        Column("bytes", "number", least=PAGES, page=False),
        Column(flop[0], "number", "achieved rate", 75),
        Column(byte[0], "number", "achieved rate of compulsory traffic", 92),
        Column("FLOP/B", "number", "arithmetic intensity", 100),
        Column("occupied", "number", least=160, page=False),
        Column("waves", "number", least=160, page=False),
        Column("dtype", least=145, page=False),
        Column("cost", "text", "where FLOPs and bytes come from: exact formula, derived, generic, or none; the peak judged against; waves "
               "of thread blocks (below 1, parts of the device stay empty) and estimated occupancy", 145),
    ]  # fmt: skip
    rows = []
    for group in groups:
        part = f"of {labels.format_number(group.judged_share, 100, ' %')} of it" if _is_partial(group) else ""
        beaten = _OVER_ROOF_CAUSES.get(group.over_roof_cause or "", "") if group.over_roof_ns else ""
        occupied = _build_number_cell(group.occupancy, 100, " %")
        waves = "" if group.waves is None else f"{labels.format_number(group.waves)} waves"
        filled = ", ".join(text for text in (waves, "" if group.occupancy is None else f"{occupied.text} occupied") if text)
        rows.append(_build_group_row(
            table, group,
            Cell(format_group_efficiency(group), group.efficiency, (part, beaten)),
            Cell(format_share(group.judged_share), group.judged_share),
            Cell(format_flop(group.flops.value), group.flops.value),
            Cell(format_bytes(group.bytes.value), group.bytes.value),
            _build_number_cell(_compute_rate(group.flops), flop[1]),
            _build_number_cell(_compute_rate(group.bytes), byte[1]),
            _build_number_cell(group.intensity),
            occupied,
            _build_number_cell(group.waves),
            Cell(group.dtype or ""),
            Cell(group.provenance or "mixed", details=(f"{group.engine} peak" if group.engine else "", filled)),
        ))  # fmt: skip
    by = _SORTED_BY.get(table.sorting, "")
    columns = [msgspec.structs.replace(column, least=0) if column.title == by else column for column in columns]
    return Table(tuple(columns), tuple(rows), f"Ops by {table.sorting}", table.grouping, table.grouping, wide=True)


_SHARED_COLUMNS = (
    Column("rows", "number", "ops with shapes in it", PAGES),
    Column("calls", "number", least=70),
    Column("time", "number", "summed time of its kernels"),
    Column("share", "number", "of the time of all ops", 60),
    Column("time/call", "number", least=130, page=False),
    Column("bound", "text", "what limits most of its time", 60),
)


def _build_group_row(table: OpTable, group: OpGroup, *cells: Cell) -> Row:
    by_shapes = table.grouping == "signature"
    said = (group.module, group.phase, group.signature if by_shapes else None) if table.grouping in ("op", "signature") else ()
    key = {"op": group.op, "module": group.module, "phase": group.phase}.get(table.grouping)
    known = {"phase": group.phase, "op": group.op, "signature": group.op}.get(table.grouping)
    link = (table.grouping, known) if known else None
    return build_row(
        Cell(format_kernel_name(group.name[:LONGEST_NAME]), details=tuple(text for text in said if text), link=link),
        build_count_cell(group.rows),
        build_count_cell(group.calls),
        build_time_cell(group.kernel_ns),
        build_share_cell(group.share),
        build_time_cell(group.kernel_ns / group.calls if group.calls else None),
        group.bound,
        *cells,
        detail=(group.signature or "") if by_shapes else "",
        keys={table.grouping: group.name} if key else {},
    )


def _link_op(group: OpGroup) -> tuple[str, str] | None:
    return ("op", group.op) if group.op else None


def _is_partial(group: OpGroup) -> bool:
    return labels.ROUNDS_TO_ZERO <= group.judged_share < 1 - labels.ROUNDS_TO_ZERO


def build_kernels_table(report: ReportData) -> Table:
    """Return the kernels by name, for a page."""
    rows = [
        build_row(
            Cell(format_kernel_name(row.name)), row.kind, (row.kernel_class or "").replace("_", " "), build_count_cell(row.count),
            build_time_cell(row.kernel_ns), row.bound, row.op or "",
        )
        for row in sorted(report.kernels, key=lambda row: -row.kernel_ns)
    ]  # fmt: skip
    columns = (
        Column("kernel", "name"), Column("kind", help="kernel, copy or memory fill"),
        Column("class", help="kind of work by the kernel's name alone"), Column("calls", "number"), Column("time", "number"),
        Column("bound"), Column("op", "name", "that launched most of its time"),
    )  # fmt: skip
    return Table(columns, tuple(rows), "Kernels by time", "kernels")


def build_collectives_table(report: ReportData) -> Table:
    """Return the collectives by name, group and size, for a page."""

    def build(row: CollectiveRow) -> Row:
        rate = labels.compute_rate(row.bytes, row.kernel_ns)
        return build_row(
            name_collective(row.name), row.group or "", build_count_cell(row.size), build_count_cell(row.count),
            build_time_cell(row.kernel_ns), Cell("?" if row.bytes is None else format_bytes(row.bytes), row.bytes),
            Cell("?" if rate is None else format_rate(rate, "B"), rate),
        )  # fmt: skip

    columns = (
        Column("collective", "name"), Column("group", "name"), Column("ranks", "number"), Column("calls", "number"),
        Column("time", "number"), Column("bytes", "number"), Column("rate", "number", "bytes / time, waiting for other ranks included"),
    )  # fmt: skip
    rows = tuple(build(row) for row in sorted(report.collectives, key=lambda row: -row.kernel_ns))
    return Table(columns, rows, "Collective communication", "collectives")


def format_group_efficiency(group: OpGroup) -> str:
    """Return how close a group runs to its roofline: a percentage, 'above roofline', or '?' where it is not known.

    '~' marks what is a guess in 1 % of its time or more.
    """
    known = labels.OVER_ROOF if group.efficiency is None and group.over_roof_ns else labels.format_number(group.efficiency, 100, " %")
    return labels.mark_guess(known, group.guessed_ns > labels.ROUNDS_TO_ZERO * group.kernel_ns)


def _compute_rate(known: KnownSum) -> float | None:
    return labels.compute_rate(known.value, known.ns)


def flatten_group(group: OpGroup) -> dict[str, Any]:
    """Return a group as flat keys with their unit and raw values; null is not known."""
    return {
        "group": group.name[:LONGEST_NAME],
        "op": group.op,
        "signature": group.signature,
        "module": group.module,
        "phase": group.phase,
        "dtype": group.dtype,
        "engine": group.engine,
        "cost_provenance": group.provenance,
        "kernel_class": group.kernel_class,
        "rows": group.rows,
        "calls": group.calls,
        "kernel_ns": group.kernel_ns,
        "time_share": group.share,
        "flop": group.flops.value,
        "flop_known_ns": group.flops.ns,
        "flop_per_s": _compute_rate(group.flops),
        "bytes": group.bytes.value,
        "bytes_known_ns": group.bytes.ns,
        "byte_per_s": _compute_rate(group.bytes),
        "flop_per_byte": group.intensity,
        "t_roof_ns": group.t_roof.value,
        "t_roof_known_ns": group.t_roof.ns,
        "efficiency_share": group.efficiency,
        "over_roof_ns": group.over_roof_ns,
        "recompute_ns": group.recompute_ns,
        "guessed_ns": group.guessed_ns,
        "occupancy_share": group.occupancy,
        "waves": group.waves,
        "bound": group.bound,
        **{f"{bound}_bound_ns": group.bound_ns.get(bound, 0) for bound in BOUNDS},
    }


def encode_op_table_json(table: OpTable, top: int | None = None) -> bytes:
    """Return the first `top` groups (default: all) as JSON: {group_by, sort_by, total_ns, groups: [...]}."""
    rows = [flatten_group(group) for group in table.groups[:top]]
    made = {"group_by": table.grouping, "sort_by": table.sorting, "total_ns": table.total_ns, "groups": rows}
    return msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n"


def encode_op_table_csv(table: OpTable, top: int | None = None) -> str:
    """Return the first `top` groups (default: all) as CSV (RFC 4180, one header line); an empty cell is not known.

    A text that a spreadsheet would run as a formula gets an apostrophe in front.
    """
    sink = io.StringIO()
    rows = [flatten_group(group) for group in table.groups[:top]]
    writer = csv.writer(sink)
    writer.writerow(rows[0] if rows else [])
    for row in rows:
        texts = {key: clean(value, LONGEST_NAME) for key, value in row.items() if isinstance(value, str)}
        harmless = {key: f"'{text}" if text.startswith(_FORMULA) else text for key, text in texts.items()}
        writer.writerow({**row, **harmless}.values())
    return sink.getvalue()
