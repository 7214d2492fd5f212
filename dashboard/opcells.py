"""The lines of the op table in words."""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag_dashboard import parts
from gpudiag_dashboard.view import View

from gpudiag.model.report import OpRow, ReportData
from gpudiag.report import words
from gpudiag.report.labels import site_text
from gpudiag.report.optable import Group, Known, OpTable, Sorting
from gpudiag.units import format_ns, format_share

_LONGEST = 200


def columns(table: OpTable, view: View) -> list[parts.Column]:
    """Return the columns; a click on a title sorts by it."""
    named = (
        "kernel"
        if table.grouping == "kernel"
        else "phase"
        if table.grouping == "phase"
        else "module"
        if table.grouping == "module"
        else "op"
    )
    told = [
        parts.Column(named),
        _sorts("calls", "calls", table, view),
        _sorts("time", "time", table, view, "summed time of the kernels"),
        parts.Column("share", True, "of the time of all ops"),
        parts.Column("bound", False, "what limits most of its time"),
    ]
    if table.grouping == "kernel":
        return [*told, parts.Column("launched by", False, "the op that launched most of its time")]
    return [
        *told,
        _sorts("of roof", "efficiency", table, view, "roofline time / measured time; the lowest first"),
        _sorts("work", "flops", table, view, "achieved rate; sorted by the amount of work"),
        _sorts("traffic", "bytes", table, view, "achieved rate of compulsory traffic; sorted by the amount"),
        _sorts("FLOP/B", "ai", table, view, "arithmetic intensity"),
        parts.Column("cost", False, "where FLOPs and bytes come from, and the peak judged against"),
    ]


def _sorts(title: str, sorting: Sorting, table: OpTable, view: View, said: str = "") -> parts.Column:
    direction = "ascending" if sorting == "efficiency" else "descending"
    now = direction if table.sorting == sorting else ""
    return parts.Column(title, True, said, view.href(sort=None if sorting == "time" else sorting, sheet=None), now)


def rows(groups: Sequence[Group], table: OpTable, report: ReportData, view: View) -> list[list[parts.Cell]]:
    """Return the cells of each line."""
    units = words.flop_unit(report), words.byte_unit(report)
    return [_row(group, table, units, view) for group in groups]


def _row(group: Group, table: OpTable, units: tuple[tuple[str, float], tuple[str, float]], view: View) -> list[parts.Cell]:
    cells = [
        _name(group, table, view),
        parts.Cell(f"{group.calls:,}"),
        parts.Cell(format_ns(group.kernel_ns)),
        parts.Cell("?" if group.share is None else format_share(group.share, 1)),
        parts.Cell(group.bound),
    ]
    if table.grouping == "kernel":
        return [*cells, parts.Cell(parts.text(group.op or "", _LONGEST), href=view.href("/ops", op=group.op) if group.op else "")]
    (flop_unit, flop_factor), (byte_unit, byte_factor) = units
    cost = tuple(text for text in (f"{group.engine} peak" if group.engine else "", _filled(group)) if text)
    return [
        *cells,
        parts.Cell(_of_roof(group), _part_judged(group)),
        parts.Cell(_rate(group.flops, flop_factor, flop_unit)),
        parts.Cell(_rate(group.bytes, byte_factor, byte_unit)),
        parts.Cell(words.number(group.intensity)),
        parts.Cell(group.provenance or "several", cost),
    ]


def _name(group: Group, table: OpTable, view: View) -> parts.Cell:
    """Return the cell that names a line; it leads to the op by shapes, or (by phase) to the ops of that phase."""
    name = parts.text(group.name, _LONGEST)
    if table.grouping == "phase":
        return parts.Cell(name, href=view.href(group=None, phase=group.phase, sheet=None) if group.phase else "")
    if table.grouping in ("kernel", "module"):
        return parts.Cell(name, (group.kernel_class.replace("_", " "),) if group.kernel_class else ())
    details = [group.module, group.phase, group.signature if table.grouping == "signature" else None]
    told = tuple(parts.text(text, 240) for text in details if text)
    alone = table.grouping == "signature" and view.query.get("op") == group.op
    return parts.Cell(name, told, href=view.href(op=group.op, group=None, sheet=None) if group.op and not alone else "")


def _of_roof(group: Group) -> str:
    if group.efficiency is None and group.over_roof_ns:
        return words.OVER_ROOF
    return words.number(group.efficiency, 100, " %")


def _part_judged(group: Group) -> tuple[str, ...]:
    """Return how much of the time the efficiency speaks of, where that is not all of it."""
    if group.efficiency is None or group.judged_share >= 1 - words.ROUNDS_TO_ZERO:
        return ()
    return (f"of {format_share(group.judged_share)} of the time",)


def _rate(known: Known, factor: float, unit: str) -> str:
    rate = words.per_second(known.value, known.ns)
    return "?" if rate is None else f"{words.number(rate, factor)} {unit}"


def _filled(group: Group) -> str:
    waves = "" if group.waves is None else f"{words.number(group.waves)} waves"
    occupancy = "" if group.occupancy is None else f"{words.number(group.occupancy, 100, ' %')} occupied"
    return ", ".join(text for text in (waves, occupancy) if text)


def count_line(found: int, of: int, time_ns: int, table: OpTable) -> str:
    """Return how many lines there are, how much of the time they take, and whether small ones were left out of the report."""
    lines = f"{found:,} line{'' if found == 1 else 's'}" if found == of else f"{found:,} of {of:,} lines"
    share = f", {format_share(time_ns / table.total_ns, 1)} of all" if table.total_ns else ""
    cut = f"; the report keeps the {table.cut:,} largest kernels" if table.cut else ""
    return f"{lines}: {format_ns(time_ns)}{share}{cut}"


def summary(rows: Sequence[OpRow], report: ReportData) -> str:
    """Return calls, time and share of one op over all its shapes."""
    time, total = words.op_total_ns(rows), words.op_total_ns(report.ops)
    share = f", {format_share(time / total, 1)} of the time of all ops" if total else ""
    return f"{sum(row.count for row in rows):,} calls, {format_ns(time)}{share}"


def sites(rows: Sequence[OpRow], most: int) -> list[str]:
    """Return the places in code that call these ops, the most expensive first."""
    ranked = sorted((row for row in rows if row.where), key=lambda row: -row.kernel_ns)
    return list(dict.fromkeys(parts.text(site_text(row.where), _LONGEST) for row in ranked))[:most]
