"""What torch.compile did, in words: how much was compiled, the graph breaks and the recompilations with their lines, costs and cures."""

from __future__ import annotations

from gpudiag.model.compilation import BreakKind, BreakRow, CodePlace, CompileReport, Cure, GuardKind, RecompileRow
from gpudiag.model.report import ReportData
from gpudiag.report import labels
from gpudiag.report.blocks import (
    PAGES,
    Amount,
    Block,
    Cell,
    Column,
    Paragraph,
    Row,
    Section,
    Table,
    build_count_cell,
    build_row,
    build_time_cell,
    say,
)
from gpudiag.report.labels import pluralize
from gpudiag.units import format_ns, format_share

TITLE = "What torch.compile did"

MOST_ON_A_TERMINAL = 5

_GUARDS: dict[GuardKind, str] = {
    "size": "size of {name}",
    "stride": "strides of {name}",
    "rank": "number of dimensions of {name}",
    "dtype": "element type of {name}",
    "device": "device of {name}",
    "requires_grad": "whether {name} needs a gradient",
    "value": "value of {name}",
    "identity": "which object {name} is",
    "type": "type of {name}",
    "mode": "a global setting (grad mode, autocast, ...)",
    "aliasing": "whether two arguments are one tensor",
    "backend": "the back end, made anew",
    "other": "another condition",
}
CURE_WORDS: dict[Cure, str] = {
    "dynamic": "torch._dynamo.mark_dynamic or dynamic=True; or pad to a few sizes",
    "constant": "keep it constant, or pass it as a tensor",
    "contiguous": "give it the same layout each time: .contiguous()",
    "pad": "the same number of dimensions each time",
    "one_dtype": "the same element type each time",
    "same_mode": "once for each is by design; where it goes on, call it in one mode",
    "outside": "make the object once, outside the compiled function",
    "one_backend": "call torch.compile once, before the loop",
}
BREAK_CURES: dict[BreakKind, str] = {
    "number": "keep the number on the device; or torch._dynamo.config.capture_scalar_outputs=True",
    "branch": "torch.where or torch.cond in place of the condition",
    "asked": "the program asks for it: take it out",
    "call": "call it outside the compiled function, or make it a torch.library.custom_op",
}


def build_compilation_section(report: ReportData, amount: Amount) -> Section | None:
    """Return what was compiled, where compiled code is left, and why functions were compiled again; None where there is no log of it."""
    found = report.compilation
    if found is None:
        return None
    steps = max(1, report.steps.count)
    blocks: list[Block | None] = [Paragraph(_sum_up(report, found))]
    most = 50 if amount.page else MOST_ON_A_TERMINAL
    if found.breaks:
        blocks.append(_build_break_table(found.breaks[:most], steps))
    if found.recompiles:
        blocks.append(_build_recompile_table(found.recompiles[:most], steps))
    left = max(0, len(found.breaks) - most) + max(0, len(found.recompiles) - most)
    blocks.append(say(f"{left} more: in the page and the JSON." if left and not amount.page else "", "quiet"))
    return Section(TITLE, tuple(block for block in blocks if block is not None), "compile-title", nav="torch.compile")


def _sum_up(report: ReportData, found: CompileReport) -> str:
    took = "" if found.compile_ns is None else f", took {format_ns(found.compile_ns)}"
    what = f"{found.functions:,} {pluralize(found.functions, 'function')}, or of what follows their graph breaks"
    text = f"Since the program began: {found.compilations:,} {pluralize(found.compilations, 'compilation')} of {what}{took}"
    if found.in_steps:
        wall = report.breakdown.wall_ns
        share = f" ({format_share(found.idle_ns / wall, 1)} of their time)" if found.idle_ns is not None and wall else ""
        cost = (
            ""
            if found.idle_ns is None
            else f", during which the {labels.name_device(report)} trained nothing for {format_ns(found.idle_ns)}{share}"
        )
        text += f"; {found.in_steps:,} fell into the analysed steps{cost}"
    elif found.idle_ns is not None:
        text += "; none fell into the analysed steps"
    text += "."
    if found.failed:
        text += f" Of all, {found.failed:,} failed: that code runs uncompiled."
    if found.dropped:
        text += f" {found.dropped:,} more are not told: torch had forgotten them."
    return text


def _build_break_table(rows: tuple[BreakRow, ...], steps: int) -> Table:
    columns = (
        Column("graph break at", "path"),
        Column("a step", "number", "times that the analysed steps passed it"),
        Column("between", "number", "time of the host between the two graphs, a step"),
        Column("idle", "number", "idle time of the device meanwhile, a step"),
        Column("why", help="the compiler's own words", least=PAGES, below=""),
        Column("what mends it", least=PAGES, below="what mends it: "),
    )
    return Table(columns, tuple(_build_break_row(row, steps) for row in rows), "Graph breaks")


def _build_break_row(row: BreakRow, steps: int) -> Row:
    times = Cell("?") if row.crossed is None else Cell(f"{row.crossed / steps:.3g}", row.crossed / steps)
    why = row.reason or "a function that is compiled on its own begins there"
    if row.function is not None:
        why += f", in {row.function.function} ({format_place(row.function)})"
    between, idle = ((None if value is None else value / steps) for value in (row.between_ns, row.idle_ns))
    quiet = row.crossed == 0
    return build_row(
        format_place(row.place), times, *(Cell("-") if quiet else build_time_cell(value) for value in (between, idle)), why,
        BREAK_CURES.get(row.kind, ""),
    )  # fmt: skip


def _build_recompile_table(rows: tuple[RecompileRow, ...], steps: int) -> Table:
    columns = (
        Column("compiled again", "path"),
        Column("times", "number", "since the program began"),
        Column("took", "number", "all of them"),
        Column("in these steps", "number", "of them, compilations in the analysed steps"),
        Column("idle", "number", "time of the analysed steps in which the device did not train meanwhile, a step"),
        Column("what had changed", help="the guard that failed", least=PAGES, below="changed: "),
        Column("what mends it", least=PAGES, below="what mends it: "),
    )
    return Table(columns, tuple(_build_recompile_row(row, steps) for row in rows), "Compiled again")


def _build_recompile_row(row: RecompileRow, steps: int) -> Row:
    return build_row(
        f"{format_place(row.function)} {row.function.function}{', after its graph break' if row.rest else ''}",
        build_count_cell(row.count),
        build_time_cell(row.compile_ns),
        build_count_cell(row.in_steps if row.idle_ns is not None else None),
        build_time_cell(None if row.idle_ns is None else row.idle_ns / steps),
        format_guard(row),
        CURE_WORDS.get(row.cure, ""),
    )


def format_guard(row: RecompileRow) -> str:
    """Return what a guard asked that failed, with some values and the line that made it ask."""
    if row.kind is None:
        return "not told by this version of torch"
    text = _GUARDS[row.kind].format(name=row.name or "an argument")
    values = [f"{expected or '?'} then {actual}" if actual else f"was {expected}" for expected, actual in row.values]
    text += f": {', '.join(values)}" if values else ""
    return text if row.place is None else f"{text}, asked at {format_place(row.place)}"


def format_place(place: CodePlace) -> str:
    """Return 'folder/file.py:12', the path with its last two parts."""
    file = place.near_file
    return f"{file}:{place.line}" if place.line else file or "?"
