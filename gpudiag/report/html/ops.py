"""The op table of the HTML page: each op with its shapes, and the same summed by op, module and phase."""

from __future__ import annotations

from collections.abc import Callable

from gpudiag.model.report import OpRow, ReportData
from gpudiag.report import words
from gpudiag.report.escape import clean
from gpudiag.report.html.figures import ops_by_time
from gpudiag.report.html.table import (
    Cell,
    Column,
    Row,
    Table,
    View,
    count_cell,
    name_cell,
    number_cell,
    share_cell,
    time_cell,
    told,
    view_of,
)
from gpudiag.report.labels import namer, phase_text, recompute_text, site_text
from gpudiag.report.optable import Group, Grouping, op_table

_NAME = Column("op", False, "with the shapes of its tensors, and the function that calls it (for a backward op: its forward op)")
_TIME = (
    Column("calls", True),
    Column("time", True, "summed time of its kernels"),
    Column("share", True, "of the time of all ops"),
    Column("bound", False, "what limits most of its time"),
    Column("of roof", True, "roofline time / measured time"),
)
_COST = Column(
    "cost",
    False,
    "where FLOPs and bytes come from: exact formula, derived, generic, or none; the peak judged against; waves of thread blocks "
    "(below 1, parts of the device stay empty) and estimated occupancy",
)
_GROUPS: tuple[tuple[Grouping, str, Column], ...] = (
    ("op", "op", Column("op", False, "all shapes and modules together")),
    ("module", "module", Column("module")),
    ("phase", "phase", Column("phase")),
)

Unit = tuple[str, float]


def table(report: ReportData) -> Table:
    """Return the op table with its views; by module and by phase where more than one of them is known."""
    units = words.flop_unit(report), words.byte_unit(report)
    views = [_rows(report, units)]
    if len(report.ops) > 1:
        views += [made for key, label, column in _GROUPS if (made := _grouped(report, key, label, column, units))]
    return Table("ops", tuple(views))


def _rates(units: tuple[Unit, Unit]) -> tuple[Column, ...]:
    achieved = (Column(units[0][0], True, "achieved"), Column(units[1][0], True, "achieved, compulsory traffic"))
    return (*achieved, Column("FLOP/B", True, "arithmetic intensity"))


def _rows(report: ReportData, units: tuple[Unit, Unit]) -> View:
    total, name = words.op_total_ns(report.ops), namer(report)
    rows = [Row(_op(row, name(row), total, units), _keys(row)) for row in ops_by_time(report)]
    return view_of((_NAME, Column("phase"), *_TIME, *_rates(units), _COST), rows, label="op and shapes")


def _keys(row: OpRow) -> dict[str, str]:
    """Return what a row is found by, in the words of the page."""
    known = {"op": row.name, "module": row.module, "phase": phase_text(row)}
    return {key: clean(text, 160) for key, text in known.items() if text}


def _op(row: OpRow, name: str, total_ns: int, units: tuple[Unit, Unit]) -> tuple[Cell, ...]:
    detail = " ".join(text for text in (row.module, row.signature) if text)
    return (
        Cell(clean(name, 160), details=told(detail, site_text(row.where), recompute_text(row))),
        name_cell(phase_text(row)),
        count_cell(row.count),
        time_cell(row.kernel_ns),
        share_cell(row.kernel_ns / total_ns if total_ns else None),
        Cell(row.bound),
        Cell(words.of_roof(row), words.over_roof(row) or row.efficiency, told(words.over_roof_cause(row))),
        number_cell(words.per_second(row.flops, row.kernel_ns), units[0][1]),
        number_cell(words.per_second(row.bytes, row.kernel_ns), units[1][1]),
        number_cell(words.intensity(row)),
        Cell(row.provenance, details=_launch(row)),
    )


def _launch(row: OpRow) -> tuple[str, ...]:
    """Return the peak that an op was judged against and how it filled the device, where that is known."""
    waves = "" if row.waves is None else f"{words.number(row.waves)} waves"
    occupancy = "" if row.occupancy is None else f"{words.number(row.occupancy, 100, ' %')} occupied"
    return told(f"{row.engine} peak" if row.engine else "", ", ".join(text for text in (waves, occupancy) if text))


def _grouped(report: ReportData, grouping: Grouping, label: str, column: Column, units: tuple[Unit, Unit]) -> View | None:
    """Return the ops summed by one key, None where the recording does not tell it."""
    keys: dict[str, Callable[[OpRow], str | None]] = {"op": lambda row: row.name, "module": lambda row: row.module, "phase": phase_text}
    if not any(keys[grouping](row) for row in report.ops):
        return None
    groups = op_table(report, grouping=grouping).groups
    rows = [Row(_group(group, units), {grouping: clean(group.name, 160)} if _known(group, grouping) else {}) for group in groups]
    return view_of((column, Column("rows", True, "ops with shapes in it"), *_TIME, *_rates(units)), rows, grouping, label)


def _known(group: Group, grouping: Grouping) -> bool:
    """Return whether the group has a key of its own: not so what is put to no module or phase."""
    return bool({"op": group.op, "module": group.module, "phase": group.phase}.get(grouping))


def _group(group: Group, units: tuple[Unit, Unit]) -> tuple[Cell, ...]:
    over = group.efficiency is None and group.over_roof_ns > 0
    judged = group.judged_share
    part = told(f"of {words.number(judged, 100, ' %')} of it") if words.ROUNDS_TO_ZERO <= judged < 1 - words.ROUNDS_TO_ZERO else ()
    return (
        name_cell(group.name),
        count_cell(group.rows),
        count_cell(group.calls),
        time_cell(group.kernel_ns),
        share_cell(group.share),
        Cell(group.bound),
        Cell(words.OVER_ROOF if over else words.number(group.efficiency, 100, " %"), group.efficiency, part),
        number_cell(words.per_second(group.flops.value, group.flops.ns), units[0][1]),
        number_cell(words.per_second(group.bytes.value, group.bytes.ns), units[1][1]),
        number_cell(group.intensity),
    )
