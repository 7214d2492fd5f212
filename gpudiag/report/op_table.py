"""The op table: rows filtered, grouped and sorted; as text, CSV and JSON.

Sums over rows of which some are not known are sums over the known ones, beside the time that they stand for: a rate divides the known
work by the known rows' time, an efficiency the known roofline times by the same rows' measured times.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from gpudiag.errors import InputError, UsageError
from gpudiag.facts.event_labels import format_kernel_name
from gpudiag.model.ops import BOUNDS, Bound, Provenance
from gpudiag.model.report import KernelRow, OpRow, ReportData
from gpudiag.report import labels
from gpudiag.report.console import (
    QUIET,
    clean,
    collect_text,
    create_console,
    create_table,
    fit_columns,
    format_cells,
    print_line,
    print_table_with_details,
    shorten_middle,
    shorten_path,
)
from gpudiag.report.labels import build_op_namer, format_phase
from gpudiag.units import format_bytes, format_flop, format_ns, format_share

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
    rows = list(report.ops)
    if phase is not None and rows:
        known = sorted({format_phase(row) for row in rows if row.phase})
        if phase not in known:
            raise InputError(f"no op has the phase {phase!r}", f"phases of this recording: {', '.join(known) or 'none is known'}")
        rows = [row for row in rows if format_phase(row) == phase]
    rows = [row for row in rows if bound in (None, row.bound)]
    if grouping == "module" and rows and all(row.module is None for row in rows):
        raise InputError("no op of this recording is attributed to an nn.Module", _RECORD_MODULES)
    namers: dict[str, Callable[[OpRow], str]] = {
        "op": lambda row: row.name,
        "signature": build_op_namer(report),
        "module": lambda row: row.module or _NOT_NAMED,
        "phase": lambda row: format_phase(row) or _NOT_NAMED,
    }
    total, name = labels.sum_op_ns(report.ops), namers[grouping]
    groups = [_build_group(name(members[0]), members, total) for members in _gather_rows(rows, _KEYS[grouping])]
    return OpTable(grouping, sorting, tuple(_sort_groups(groups, sorting)), total)


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


def _build_group(name: str, rows: list[OpRow], total_ns: int) -> OpGroup:
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
    return OpTable("kernel", sorting, tuple(_sort_groups(groups, sorting)), total, cut)


def _sort_groups(groups: list[OpGroup], sorting: Sorting) -> list[OpGroup]:
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
_ONLY_SORTED = 10_000
"""Least width of a column that is shown only where it is sorted by."""
_SORTED_BY: dict[str, str] = {"calls": "calls", "flops": "FLOP", "bytes": "bytes", "efficiency": "of roofline", "ai": "FLOP/B"}
"""Title of the column that shows what a table is sorted by, whatever the width."""
_TITLES: dict[Grouping, str] = {"op": "op", "signature": "op", "module": "module", "phase": "phase", "kernel": "kernel"}


class _TextColumn(NamedTuple):
    title: str
    align: str
    least: int
    cell: Callable[[OpGroup], str]


def render_op_table(table: OpTable, *, width: int = 100, top: int = 20, color: bool = False) -> str:
    """Return the first `top` groups for a terminal of `width` columns; wider ones show more columns."""
    groups = table.groups[:top]
    if not groups:
        return "No op passes these filters.\n"
    console, sink = create_console(width, color)
    sorted_by = _SORTED_BY.get(table.sorting, "")
    columns = _choose_columns(table.grouping, groups)
    figures = [[column.cell(group) for column in columns] for group in groups]
    wanted = [(column.title, 0 if column.title == sorted_by else column.least) for column in columns]
    kept, room = fit_columns(console.width, wanted, figures)
    made = create_table(((_TITLES[table.grouping], "name"), *((columns[k].title, columns[k].align) for k in kept)))
    cut = shorten_path if table.grouping == "module" else shorten_middle
    for group, row in zip(groups, figures, strict=True):
        made.add_row(*format_cells(cut(clean(format_kernel_name(group.name), LONGEST_NAME), room), *(row[k] for k in kept)))
    details = [clean(group.signature or "", 400) if table.grouping == "signature" else "" for group in groups]
    print_table_with_details(console, made, details)
    # What was left out, and the words in the table that are no figures
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
    for said in notes:
        print_line(console, said, QUIET)
    return collect_text(sink)


def _choose_columns(grouping: Grouping, groups: Sequence[OpGroup]) -> list[_TextColumn]:
    shared = [
        _TextColumn("calls", "right", 72, lambda group: f"{group.calls:,}"),
        _TextColumn("time", "right", 0, lambda group: format_ns(group.kernel_ns)),
        _TextColumn("share", "right", 60, lambda group: format_share(group.share, 1)),
        _TextColumn("time/call", "right", 130, lambda group: format_ns(group.kernel_ns / group.calls if group.calls else None)),
        _TextColumn("bound", "left", 60, lambda group: group.bound),
    ]
    if grouping == "kernel":
        kind = _TextColumn("class", "left", 100, lambda group: clean((group.kernel_class or "").replace("_", " "), 40))
        return [*shared, kind, _TextColumn("op", "left", 120, lambda group: clean(group.op or "", 40))]
    flop = labels.choose_rate_unit("FLOP/s", [(_compute_rate(group.flops), group.kernel_ns) for group in groups])
    byte = labels.choose_rate_unit("B/s", [(_compute_rate(group.bytes), group.kernel_ns) for group in groups])
    partial = any(labels.ROUNDS_TO_ZERO <= group.judged_share < 1 - labels.ROUNDS_TO_ZERO for group in groups)
    return [
        *shared,
        _TextColumn("of roofline", "right", 0, format_group_efficiency),
        _TextColumn("judged", "right", 60 if partial else 145, lambda group: format_share(group.judged_share)),
        _TextColumn("FLOP", "right", _ONLY_SORTED, lambda group: format_flop(group.flops.value)),
        _TextColumn("bytes", "right", _ONLY_SORTED, lambda group: format_bytes(group.bytes.value)),
        _TextColumn(flop[0], "right", 90, lambda group: labels.format_number(_compute_rate(group.flops), flop[1])),
        _TextColumn(byte[0], "right", 100, lambda group: labels.format_number(_compute_rate(group.bytes), byte[1])),
        _TextColumn("FLOP/B", "right", 110, lambda group: labels.format_number(group.intensity)),
        _TextColumn("occupied", "right", 160, lambda group: labels.format_number(group.occupancy, 100, " %")),
        _TextColumn("waves", "right", 160, lambda group: labels.format_number(group.waves)),
        _TextColumn("dtype", "left", 145, lambda group: clean(group.dtype or "", 20)),
        _TextColumn("cost", "left", 145, lambda group: group.provenance or "mixed"),
    ]


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
