"""The op table for those who want it: rows of a report filtered, summed by group and sorted. Pure functions of the report.

Sums over rows of which some are not known are sums over the known ones, beside the time that they stand for: a rate divides the known
work by the known rows' time, an efficiency the known roofline times by the same rows' measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import msgspec

from gpudiag.errors import InputError, UsageError
from gpudiag.model.cost import BOUNDS, Bound, Provenance
from gpudiag.model.report import KernelRow, OpRow, ReportData
from gpudiag.report import words
from gpudiag.report.labels import namer, phase_text

Grouping = Literal["op", "signature", "module", "phase", "kernel"]
Sorting = Literal["time", "calls", "flops", "bytes", "efficiency", "ai"]

NO_MODULE = "no op of this recording can be put to an nn.Module"
_RECORD_MODULES = "modules stand in Python stacks: record with gpudiag.profile, or with torch.profiler.profile(with_stack=True)"
_NOT_NAMED = "(not known)"
_Row = TypeVar("_Row", OpRow, KernelRow)


class Known(msgspec.Struct, frozen=True):
    """A sum over the rows whose value is known (None: over none), and the kernel time of those rows in ns."""

    value: float | None
    ns: int


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the op table. Keys that are not grouped by are null where they differ within the group."""

    name: str
    """What the group is called: the op, module, phase or kernel."""
    op: str | None
    signature: str | None
    module: str | None
    phase: str | None
    dtype: str | None
    engine: str | None
    """Peak that its matrix work was judged against."""
    provenance: Provenance | None
    """Of the costs, where one holds for the whole group."""
    kernel_class: str | None = None
    rows: int
    """Rows of the report in it."""
    calls: int
    kernel_ns: int
    share: float | None
    """Of the time of all ops of the report, before any filter."""
    flops: Known
    bytes: Known
    intensity: float | None
    """FLOP/byte over the rows where both are known."""
    t_roof: Known
    """Roofline time in ns, without rows that beat their roof."""
    efficiency: float | None
    """t_roof / time of the same rows."""
    over_roof_ns: int
    """Time of rows that are faster than their roof: the peak or a count is wrong, so they have no efficiency."""
    bound: Bound
    """Where most of its time goes."""
    bound_ns: dict[Bound, int]
    recompute_ns: int
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
    groups: tuple[Group, ...]
    total_ns: int
    """Time of all rows of the report, before any filter."""
    cut: int = 0
    """Rows of which the report keeps the largest alone (kernel names); 0: it keeps all."""


def op_table(
    report: ReportData,
    *,
    grouping: Grouping = "op",
    sorting: Sorting = "time",
    phase: str | None = None,
    bound: Bound | None = None,
) -> OpTable:
    """Return the rows of `report` that pass the filters, summed by group and sorted.

    Raises InputError where the recording does not hold what is asked for, UsageError where the question makes no sense.
    """
    if grouping == "kernel":
        return _kernel_table(report, sorting, phase, bound)
    rows = _in_phase(report.ops, phase)
    rows = [row for row in rows if bound in (None, row.bound)]
    if grouping == "module" and rows and all(row.module is None for row in rows):
        raise InputError(NO_MODULE, _RECORD_MODULES)
    total = words.op_total_ns(report.ops)
    name = _namers(report)[grouping]
    groups = [_group(name(members[0]), members, total) for members in _gathered(rows, _KEYS[grouping])]
    return OpTable(grouping, sorting, tuple(_sorted(groups, sorting)), total)


_KEYS: dict[str, Callable[[OpRow], tuple[str | None, ...]]] = {
    "op": lambda row: (row.name,),
    "signature": lambda row: (row.name, row.signature),
    "module": lambda row: (row.module,),
    "phase": lambda row: (row.phase,),
}


def _namers(report: ReportData) -> dict[str, Callable[[OpRow], str]]:
    label = namer(report)
    return {
        "op": lambda row: row.name,
        "signature": label,
        "module": lambda row: row.module or _NOT_NAMED,
        "phase": lambda row: phase_text(row) or _NOT_NAMED,
    }


def _in_phase(rows: Iterable[OpRow], phase: str | None) -> list[OpRow]:
    """Return the rows of a phase. Raises InputError where none has it, with those that occur."""
    rows = list(rows)
    if phase is None or not rows:
        return rows
    known = sorted({phase_text(row) for row in rows if row.phase})
    if phase not in known:
        raise InputError(f"no op has the phase {phase!r}", f"phases of this recording: {', '.join(known) or 'none is known'}")
    return [row for row in rows if phase_text(row) == phase]


def _gathered(rows: Iterable[_Row], key: Callable[[_Row], tuple[str | None, ...]]) -> list[list[_Row]]:
    """Return the rows of each key, in the order of the keys' first rows."""
    found: dict[tuple[str | None, ...], list[_Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.values())


def _group(name: str, rows: list[OpRow], total_ns: int) -> Group:
    time = words.op_total_ns(rows)
    judged = [row for row in rows if words.over_roof(row) is None]
    roof = _known(judged, lambda row: row.t_roof_ns)
    both = [row for row in rows if row.flops is not None and row.bytes is not None]
    moved = sum(row.bytes or 0.0 for row in both)
    bound_ns = _bound_ns(rows)
    return Group(
        name=name,
        op=_same(row.name for row in rows),
        signature=_same(row.signature for row in rows),
        module=_same(row.module for row in rows),
        phase=_same(row.phase for row in rows),
        dtype=_same(row.dtype for row in rows),
        engine=_same(row.engine for row in rows),
        provenance=_same(row.provenance for row in rows),
        rows=len(rows),
        calls=sum(row.count for row in rows),
        kernel_ns=time,
        share=time / total_ns if total_ns else None,
        flops=_known(rows, lambda row: row.flops),
        bytes=_known(rows, lambda row: row.bytes),
        intensity=sum(row.flops or 0.0 for row in both) / moved if moved else None,
        t_roof=roof,
        efficiency=roof.value / roof.ns if roof.value is not None and roof.ns else None,
        over_roof_ns=time - words.op_total_ns(judged),
        bound=max(bound_ns, key=lambda bound: bound_ns[bound]),
        bound_ns=bound_ns,
        recompute_ns=sum(row.recompute_ns for row in rows),
        occupancy=_mean(rows, lambda row: row.occupancy),
        waves=_mean(rows, lambda row: row.waves),
    )


_Value = TypeVar("_Value", bound=str)


def _same(values: Iterable[_Value | None]) -> _Value | None:
    """Return the value that all share, None where they differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _known(rows: Iterable[OpRow], value: Callable[[OpRow], float | None]) -> Known:
    found = [(number, row.kernel_ns) for row in rows if (number := value(row)) is not None]
    return Known(sum(number for number, _ in found) if found else None, sum(ns for _, ns in found))


def _mean(rows: Iterable[OpRow], value: Callable[[OpRow], float | None]) -> float | None:
    """Return the mean weighted by kernel time over the rows whose value is known."""
    found = [(number, row.kernel_ns) for row in rows if (number := value(row)) is not None]
    total = sum(ns for _, ns in found)
    return sum(number * ns for number, ns in found) / total if total else None


def _bound_ns(rows: list[OpRow]) -> dict[Bound, int]:
    """Return the time by bound; a row that does not say how its time splits counts as its main bound."""
    sums = {bound: sum((row.bound_ns or {row.bound: row.kernel_ns}).get(bound, 0) for row in rows) for bound in BOUNDS}
    return {bound: ns for bound, ns in sums.items() if ns} or {rows[0].bound: 0}


def _kernel_table(report: ReportData, sorting: Sorting, phase: str | None, bound: Bound | None) -> OpTable:
    """Return the kernels by name: time and calls alone, for work is known by op."""
    if sorting not in ("time", "calls"):
        raise UsageError(f"kernels cannot be sorted by {sorting}: work is counted by op, not by kernel", "use --sort time or calls")
    if phase is not None:
        raise UsageError("kernels are not told apart by phase", "leave --phase or --group kernel out")
    rows = [row for row in report.kernels if bound in (None, row.bound)]
    if not report.kernels and report.ops:
        raise InputError("this run has no kernels: the device is the CPU, whose work comes in ops", "use --group op")
    total = sum(row.kernel_ns for row in report.kernels)
    groups = [_kernel_group(members, total) for members in _gathered(rows, lambda row: (row.name,))]
    return OpTable("kernel", sorting, tuple(_sorted(groups, sorting)), total, len(report.kernels) if _is_cut(report) else 0)


def _is_cut(report: ReportData) -> bool:
    """Return whether the report leaves small kernels out: their launches do not add up to those that were read."""
    return sum(row.count for row in report.kernels) < report.trust.kernels


def _kernel_group(rows: list[KernelRow], total_ns: int) -> Group:
    bound_ns = {
        bound: sum(row.kernel_ns for row in rows if row.bound == bound) for bound in BOUNDS if any(row.bound == bound for row in rows)
    }
    nothing, time = Known(None, 0), sum(row.kernel_ns for row in rows)
    return Group(
        name=rows[0].name,
        op=max(rows, key=lambda row: row.kernel_ns).op,
        signature=None,
        module=None,
        phase=None,
        dtype=None,
        engine=None,
        provenance=None,
        kernel_class=_same(row.kernel_class for row in rows),
        rows=len(rows),
        calls=sum(row.count for row in rows),
        kernel_ns=time,
        share=time / total_ns if total_ns else None,
        flops=nothing,
        bytes=nothing,
        intensity=None,
        t_roof=nothing,
        efficiency=None,
        over_roof_ns=0,
        bound=max(bound_ns, key=lambda bound: bound_ns[bound]),
        bound_ns=bound_ns,
        recompute_ns=0,
    )


def _sorted(groups: list[Group], sorting: Sorting) -> list[Group]:
    """Return the groups, largest first (efficiency: lowest first, there is most to gain); what is not known comes last."""
    values: dict[str, Callable[[Group], float | None]] = {
        "time": lambda group: group.kernel_ns,
        "calls": lambda group: group.calls,
        "flops": lambda group: group.flops.value,
        "bytes": lambda group: group.bytes.value,
        "efficiency": lambda group: None if group.efficiency is None else -group.efficiency,
        "ai": lambda group: group.intensity,
    }
    value = values[sorting]

    def order(group: Group) -> tuple[bool, float, int, str]:
        number = value(group)
        return number is None, -(number or 0.0), -group.kernel_ns, group.name

    return sorted(groups, key=order)
