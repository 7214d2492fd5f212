"""The op table as text for a terminal, as CSV and as JSON. CSV and JSON hold full names and raw numbers, keys with their unit."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from gpudiag.facts.spoken import kernel_label
from gpudiag.model.cost import BOUNDS
from gpudiag.report import words
from gpudiag.report.console import QUIET, cells, finished, fitting, line, new_console, new_table, print_with_details
from gpudiag.report.escape import clean, middle, tail
from gpudiag.report.optable import Group, Grouping, Known, OpTable
from gpudiag.units import format_bytes, format_flop, format_ns, format_share

LONGEST_NAME = 10_000
"""Characters of a name in CSV and JSON: what a report keeps."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet read a cell as a formula (owasp.org/www-community/attacks/CSV_Injection)."""
_ONLY_SORTED = 10_000
"""Least width of a column that is shown only where it is sorted by."""
_SORTED_BY: dict[str, str] = {"calls": "calls", "flops": "FLOP", "bytes": "bytes", "efficiency": "of roof", "ai": "FLOP/B"}
"""Title of the column that shows what a table is sorted by, whatever the width."""
_TITLES: dict[Grouping, str] = {"op": "op", "signature": "op", "module": "module", "phase": "phase", "kernel": "kernel"}


class _Column(NamedTuple):
    """A column of the text: title, alignment, least width of the terminal, and what stands in it."""

    title: str
    align: str
    least: int
    cell: Callable[[Group], str]


def text(table: OpTable, *, width: int = 100, top: int = 20, color: bool = False) -> str:
    """Return the first `top` groups for a terminal of `width` columns; wider ones show more columns."""
    groups = table.groups[:top]
    if not groups:
        return "No op passes these filters.\n"
    console, sink = new_console(width, color)
    sorted_by = _SORTED_BY.get(table.sorting, "")
    columns = _columns(table.grouping, groups)
    figures = [[column.cell(group) for column in columns] for group in groups]
    wanted = [(column.title, 0 if column.title == sorted_by else column.least) for column in columns]
    kept, room = fitting(console.width, wanted, figures)
    made = new_table(((_TITLES[table.grouping], "name"), *((columns[k].title, columns[k].align) for k in kept)))
    cut = tail if table.grouping == "module" else middle
    for group, row in zip(groups, figures, strict=True):
        made.add_row(*cells(cut(clean(kernel_label(group.name), LONGEST_NAME), room), *(row[k] for k in kept)))
    details = [clean(group.signature or "", 400) if table.grouping == "signature" else "" for group in groups]
    print_with_details(console, made, details)
    for said in _notes(table, groups):
        line(console, said, QUIET)
    return finished(sink)


def _columns(grouping: Grouping, groups: Sequence[Group]) -> list[_Column]:
    shared = [
        _Column("calls", "right", 72, lambda group: f"{group.calls:,}"),
        _Column("time", "right", 0, lambda group: format_ns(group.kernel_ns)),
        _Column("share", "right", 60, lambda group: format_share(group.share, 1)),
        _Column("time/call", "right", 130, lambda group: format_ns(group.kernel_ns / group.calls if group.calls else None)),
        _Column("bound", "left", 60, lambda group: group.bound),
    ]
    if grouping == "kernel":
        kind = _Column("class", "left", 100, lambda group: clean((group.kernel_class or "").replace("_", " "), 40))
        return [*shared, kind, _Column("op", "left", 120, lambda group: clean(group.op or "", 40))]
    return [*shared, *_work_columns(groups)]


def _work_columns(groups: Sequence[Group]) -> list[_Column]:
    """Return the columns of work and roof; how much of a line's time is judged, wherever that is not all or nothing."""
    flop, byte = _unit("FLOP/s", groups, lambda group: group.flops), _unit("B/s", groups, lambda group: group.bytes)
    partial = any(words.ROUNDS_TO_ZERO <= group.judged_share < 1 - words.ROUNDS_TO_ZERO for group in groups)
    return [
        _Column("of roof", "right", 0, _of_roof),
        _Column("judged", "right", 60 if partial else 145, lambda group: format_share(group.judged_share)),
        _Column("FLOP", "right", _ONLY_SORTED, lambda group: format_flop(group.flops.value)),
        _Column("bytes", "right", _ONLY_SORTED, lambda group: format_bytes(group.bytes.value)),
        _Column(flop[0], "right", 90, lambda group: words.number(_rate(group.flops), flop[1])),
        _Column(byte[0], "right", 100, lambda group: words.number(_rate(group.bytes), byte[1])),
        _Column("FLOP/B", "right", 110, lambda group: words.number(group.intensity)),
        _Column("occupied", "right", 160, lambda group: words.number(group.occupancy, 100, " %")),
        _Column("waves", "right", 160, lambda group: words.number(group.waves)),
        _Column("dtype", "left", 145, lambda group: clean(group.dtype or "", 20)),
        _Column("cost", "left", 145, lambda group: group.provenance or "mixed"),
    ]


def _unit(name: str, groups: Sequence[Group], amount: Callable[[Group], Known]) -> tuple[str, float]:
    return words.unit_of_rates(name, [(_rate(amount(group)), group.kernel_ns) for group in groups])


def _of_roof(group: Group) -> str:
    if group.efficiency is None and group.over_roof_ns:
        return words.OVER_ROOF
    return words.number(group.efficiency, 100, " %")


def _rate(known: Known) -> float | None:
    return words.per_second(known.value, known.ns)


def _notes(table: OpTable, groups: Sequence[Group]) -> list[str]:
    """Return what to know about the table: what was left out, and the words in it that are no figures."""
    notes = [f"{len(groups)} of {len(table.groups)} lines; --top N shows more"] if len(groups) < len(table.groups) else []
    if table.cut:
        notes.append(f"the {table.cut:,} kernel names with most time; shares are of their time")
    if table.grouping == "kernel":
        return notes
    total = sum(group.kernel_ns for group in table.groups)
    judged = sum(group.t_roof.ns for group in table.groups)
    if judged and judged < total * (1 - words.ROUNDS_TO_ZERO):
        notes.append(f"of roof: over the time whose roof is known, {format_share(judged / total)} of these ops' time")
    over = sum(group.over_roof_ns for group in table.groups)
    if over:
        notes.append(f"{words.OVER_ROOF_LEGEND}: {format_ns(over)} in all, left out of the efficiencies")
    return [*notes, words.UNKNOWN_LEGEND] if any(group.efficiency is None and not group.over_roof_ns for group in groups) else notes


def record(group: Group) -> dict[str, Any]:
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
        "flop_per_s": _rate(group.flops),
        "bytes": group.bytes.value,
        "bytes_known_ns": group.bytes.ns,
        "byte_per_s": _rate(group.bytes),
        "flop_per_byte": group.intensity,
        "t_roof_ns": group.t_roof.value,
        "t_roof_known_ns": group.t_roof.ns,
        "efficiency_share": group.efficiency,
        "over_roof_ns": group.over_roof_ns,
        "recompute_ns": group.recompute_ns,
        "occupancy_share": group.occupancy,
        "waves": group.waves,
        "bound": group.bound,
        **{f"{bound}_bound_ns": group.bound_ns.get(bound, 0) for bound in BOUNDS},
    }


def to_json(table: OpTable, top: int | None = None) -> bytes:
    """Return the first `top` groups (default: all) as JSON: {group_by, sort_by, total_ns, groups: [...]}."""
    rows = [record(group) for group in table.groups[:top]]
    made = {"group_by": table.grouping, "sort_by": table.sorting, "total_ns": table.total_ns, "groups": rows}
    return msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n"


def to_csv(table: OpTable, top: int | None = None) -> str:
    """Return the first `top` groups (default: all) as CSV (RFC 4180, one header line); an empty cell is not known.

    A text that a spreadsheet would run as a formula gets an apostrophe in front.
    """
    sink = io.StringIO()
    rows = [record(group) for group in table.groups[:top]]
    writer = csv.writer(sink)
    writer.writerow(rows[0] if rows else [])
    writer.writerows([_cell(value) for value in row.values()] for row in rows)
    return sink.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    harmless = clean(value, LONGEST_NAME)
    return f"'{harmless}" if harmless.startswith(_FORMULA) else harmless
