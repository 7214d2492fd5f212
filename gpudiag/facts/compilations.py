"""What torch.compile did and what it cost in the analysed steps: compilations by their failed guard, graph breaks by their line.

From the bundle's log of compilations, joined with the trace by the ids in 'Torch-Compiled Region: 2/1' and by the clock.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from gpudiag.attribution import intervals as spans
from gpudiag.attribution.call_sites import INSTALLED
from gpudiag.attribution.names import decode_column
from gpudiag.facts.efficiency import find_compilation_spans
from gpudiag.facts.idle_time import COMPILED_REGION, GRAPH_CALL, find_graph_calls, find_ops
from gpudiag.facts.registry import NotKnownError, fact, require_known
from gpudiag.facts.window import Window, cache_by_window
from gpudiag.model.compilation import (
    BreakRow,
    CodePlace,
    Compilation,
    CompileLog,
    CompileReport,
    Cure,
    GraphBreak,
    GuardKind,
    RecompileRow,
)
from gpudiag.model.finding import Where

CURES: dict[GuardKind, Cure] = {
    "size": "dynamic", "value": "constant", "stride": "contiguous", "rank": "pad", "dtype": "one_dtype", "requires_grad": "same_mode",
    "mode": "same_mode", "identity": "outside", "type": "outside", "backend": "one_backend",
}  # fmt: skip
"""What mends a guard that fails again and again (torch.compile documentation: recompilation, dynamic shapes)."""

MOST_ROWS, MOST_VALUES = 50, 4

_FRAME_ID = re.compile(r"^Torch-Compiled Region: (\d{1,9})/\d{1,9}$")


class _Cost(NamedTuple):
    """Of one compilation: how much of it lies in the analysed steps, and how much of that the device was idle."""

    in_steps: bool
    idle_ns: int


def _find_costs(window: Window, found: Sequence[Compilation]) -> list[_Cost | None]:
    """Return the cost of each compilation; None where nothing tells when it was. On a CPU what runs meanwhile is not training."""
    base = window.analysis.trace.meta.unix_base_ns
    idle = window.step_spans if window.on_cpu else window.idle_spans()
    costs: list[_Cost | None] = []
    for one in found:
        if base is None or one.begun_unix_ns is None or one.duration_ns is None:
            costs.append(None)
            continue
        start = np.array([one.begun_unix_ns - base], dtype=np.int64)
        end = start + one.duration_ns
        within = spans.measure_covered(spans.merge_spans(window.host_spans), start, end)
        costs.append(_Cost(bool(within[0] > 0), int(spans.measure_covered(spans.merge_spans(idle), start, end)[0])))
    return costs


def _sum_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def is_recompilation(one: Compilation) -> bool:
    """Return whether it was not the first compilation of its frame."""
    return one.guard is not None or (not one.backward and one.id.rpartition("/")[2] not in ("", "0"))


def _build_recompile_rows(found: Sequence[Compilation], costs: Sequence[_Cost | None]) -> list[RecompileRow]:
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    of_id: dict[str, list[int]] = {}
    for index, one in enumerate(found):
        if is_recompilation(one):
            guard = one.guard
            members = groups[one.place, one.resumes_at, guard.kind if guard else "", guard.name if guard else ""]
            members.append(index)
            of_id[one.id] = members
    for index, one in enumerate(found):  # what a backward graph costs belongs to its forward
        if one.backward and one.id in of_id:
            of_id[one.id].append(index)
    rows = []
    for members in groups.values():
        first, guards = found[members[0]], [guard for index in members if (guard := found[index].guard)]
        guard, known = guards[0] if guards else None, [cost for index in members if (cost := costs[index])]
        pairs = dict.fromkeys((one.expected, one.actual) for one in guards if one.expected or one.actual)
        rows.append(
            RecompileRow(
                function=first.place,
                rest=first.resumes_at is not None,
                count=sum(not found[index].backward for index in members),
                compile_ns=_sum_known(found[index].duration_ns for index in members),
                in_steps=sum(cost.in_steps for index in members if (cost := costs[index]) and not found[index].backward),
                idle_ns=_sum_known(cost.idle_ns for cost in known),
                kind=guard.kind if guard else None,
                name=guard.name if guard else "",
                values=tuple(pairs)[:MOST_VALUES],
                place=next((one.place for one in guards if one.place), None),
                cure=CURES.get(guard.kind, "") if guard else "",
            )
        )
    return sorted(rows, key=lambda row: (-(row.idle_ns or 0), -(row.compile_ns or 0), -row.count))


def _find_crossings(window: Window) -> pl.DataFrame | None:
    """Return for each graph of the steps that follows another of the same compiled function: the frame that it belongs to, and the time
    between the two (start_ns, end_ns). None where the trace does not tell."""
    try:
        calls = find_graph_calls(window).sort("thread", "start_ns")
        if not find_ops(window, GRAPH_CALL).height:
            return None
        regions = find_ops(window, COMPILED_REGION)
    except NotKnownError:
        return None
    regions = regions.select(
        "thread", pl.col("start_ns").alias("entered"), decode_column("name").str.extract(_FRAME_ID.pattern).alias("frame")
    )
    before = pl.col("end_ns").cum_max().shift(1).over("thread", "region")
    pairs = calls.select("thread", start_ns=before, end_ns="start_ns").filter(pl.col("start_ns") < pl.col("end_ns"))
    inner = pairs.sort("end_ns").join_asof(
        regions.sort("entered"), left_on="end_ns", right_on="entered", by="thread", coalesce=False, check_sortedness=False
    )
    return inner.select("frame", "start_ns", "end_ns")


def _find_break(log: CompileLog, one: Compilation) -> GraphBreak | None:
    """Return the break that `one` follows: the rest of a function after it, or a function called there that is compiled on its own."""
    file, line, name = one.place.file, one.resumes_at, one.place.function
    of_line = [item for item in log.breaks if any(frame.file == file and frame.line == line for frame in item.stack)]
    of_name = [item for item in log.breaks if any(frame.file == file and frame.function == name for frame in item.stack[1:])]
    found = of_line if line is not None else of_name
    return max(found, key=lambda item: item.count, default=None)


def _find_place(stack: Sequence[CodePlace]) -> CodePlace:
    """Return the innermost line that is the program's own."""
    return next((frame for frame in reversed(stack) if not re.search(INSTALLED, frame.file)), stack[-1])


def _list_met_breaks(log: CompileLog, crossed: int | None) -> dict[tuple[str, CodePlace], BreakRow]:
    """Return the breaks that were met while compiling by reason and place, each as passed `crossed` times."""
    rows: dict[tuple[str, CodePlace], BreakRow] = {}
    for item in (item for item in log.breaks if item.stack):
        place, function = _find_place(item.stack), item.stack[0]
        known = rows.get((item.reason, place))
        rows[item.reason, place] = BreakRow(
            reason=item.reason,
            kind=item.kind,
            place=place,
            function=function if (function.file, function.function) != (place.file, place.function) else None,
            count=item.count + (known.count if known else 0),
            crossed=crossed,
        )
    return rows


def _build_break_rows(window: Window, log: CompileLog) -> list[BreakRow]:
    crossings = _find_crossings(window)
    if crossings is None:
        return sorted(_list_met_breaks(log, None).values(), key=lambda row: -row.count)
    compiling = find_compilation_spans(window)  # what is compiled meanwhile is told on its own
    rows, idle = _list_met_breaks(log, 0), spans.subtract_spans(spans.merge_spans(window.idle_spans()), compiling)
    frames = {number: one for one in reversed(log.compilations) if (number := one.id.rpartition("/")[0])}
    for (frame,), passed in crossings.drop_nulls("frame").group_by("frame", maintain_order=True):
        if (one := frames.get(str(frame))) is None:
            continue
        found = _find_break(log, one)
        place = one.place if one.resumes_at is None else CodePlace(one.place.file, one.resumes_at, one.place.function)
        key = (found.reason, _find_place(found.stack)) if found else ("", place)
        row = rows.get(key) or BreakRow(reason="", place=place)
        between = spans.subtract_spans(spans.build_spans(passed), compiling)
        rows[key] = msgspec.structs.replace(
            row,
            crossed=(row.crossed or 0) + passed.height,
            between_ns=(row.between_ns or 0) + int((between[:, 1] - between[:, 0]).sum()),
            idle_ns=(row.idle_ns or 0) + int(spans.measure_covered(idle, between[:, 0], between[:, 1]).sum()),
        )
    return sorted(rows.values(), key=lambda row: (-(row.between_ns or 0), -row.count))


@cache_by_window
def build_compile_report(window: Window) -> CompileReport | None:
    """Return what torch.compile did and what that cost in the analysed steps; None where the recording holds no log of it."""
    log = window.analysis.compile_log
    if log is None:
        return None
    costs = _find_costs(window, log.compilations)
    known = [cost for cost in costs if cost is not None]
    functions = {(one.place, one.resumes_at) for one in log.compilations if one.place.file}
    return CompileReport(
        compilations=len(log.compilations),
        functions=len(functions),
        compile_ns=_sum_known(one.duration_ns for one in log.compilations),
        in_steps=sum(cost.in_steps for cost in known),
        idle_ns=_sum_known(cost.idle_ns for cost in known),
        failed=sum(bool(one.failed) for one in log.compilations),
        dropped=log.dropped,
        recompiles=tuple(_build_recompile_rows(log.compilations, costs)[:MOST_ROWS]),
        breaks=tuple(_build_break_rows(window, log)[:MOST_ROWS]),
    )


def format_place(place: CodePlace) -> str:
    """Return 'folder/file.py:12 (forward)', the path with its last two parts."""
    file = place.near_file
    return f"{file}:{place.line} ({place.function})" if place.line else f"{file} ({place.function})"


def list_break_places(window: Window) -> tuple[Where, ...]:
    """Return the lines at which compiled code is left in the analysed steps, the dearest first."""
    found = build_compile_report(window)
    rows = [row for row in found.breaks if row.crossed is None or row.crossed] if found else []
    return tuple(_build_where(row.reason or "a graph ends", row.place, row.between_ns) for row in rows[:3])


def list_recompiled_places(window: Window) -> tuple[Where, ...]:
    """Return the functions that were compiled again in the analysed steps, the dearest first; none where the log does not tell."""
    found = build_compile_report(window)
    rows = [row for row in found.recompiles if row.in_steps] if found else []
    return tuple(_build_where(f"{row.function.function} compiled again", row.function, row.idle_ns) for row in rows[:3])


def _build_where(what: str, place: CodePlace, time_ns: int | None) -> Where:
    return Where(what, place.near_file or None, place.line or None, time_ns)


_NO_LOG = "what torch.compile did is kept by gpudiag run and gpudiag.profile of this version: no log of it is here"


def _read_dearest_break(window: Window) -> BreakRow:
    found = require_known(build_compile_report(window), _NO_LOG)
    return require_known(next((row for row in found.breaks if row.reason and row.crossed != 0), None), "no graph break has a known reason")


def _read_dearest_recompile(window: Window) -> RecompileRow:
    found = require_known(build_compile_report(window), _NO_LOG)
    rows = [row for row in found.recompiles if row.kind is not None]
    chosen = next((row for row in rows if row.in_steps), rows[0] if rows else None)
    return require_known(chosen, "no function was compiled again, or this version of torch does not say why")


def _knows_recompile_reason(window: Window) -> bool:
    found = build_compile_report(window)
    return found is not None and any(row.kind is not None for row in found.recompiles)


# fmt: off
FACTS = (
    fact("break_at", "text", "The line at which compiled code is left at most cost: file, line and function.",
         lambda window: format_place(_read_dearest_break(window).place)),
    fact("break_reason", "text", "Why the compiler could not go on there, in its own words.",
         lambda window: _read_dearest_break(window).reason),
    fact("break_kind", "text", "What kind of line that is: number (read from a tensor), branch (a condition asks a tensor), asked (the "
         "program asks for the break), call (cannot be compiled), or other.",
         lambda window: _read_dearest_break(window).kind or "other"),
    fact("recompile_reason_known", "bool", "Whether the recording says which guard failed where a function was compiled again.",
         _knows_recompile_reason),
    fact("recompiled_at", "text", "The function that was compiled again at most cost: file, first line and name.",
         lambda window: format_place(_read_dearest_recompile(window).function)),
    fact("recompiled_times", "count", "How often that function was compiled again for that guard, since the process began.",
         lambda window: _read_dearest_recompile(window).count),
    fact("recompile_guard", "text", "What the guard asked that failed there: size, value, dtype, stride, rank, requires_grad, mode, "
         "identity, type, device, aliasing, backend or other.",
         lambda window: _read_dearest_recompile(window).kind or "other"),
    fact("recompile_name", "text", "What that guard asks of, as the program calls it; 'an argument' where it does not say.",
         lambda window: _read_dearest_recompile(window).name or "an argument"),
)
# fmt: on
