"""A comparison of two recordings: its words and tables, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpudiag.diagnosis.regressions import describe_ratio_change, format_ratio_change
from gpudiag.facts.event_labels import format_kernel_name
from gpudiag.model.comparison import Change, FindingChange, OpChange, RunSide, StepComparison, StepRatio
from gpudiag.report.console import (
    QUIET,
    clean,
    collect_text,
    create_console,
    create_table,
    escape_markdown,
    fit_columns,
    format_code_span,
    print_heading,
    print_line,
    print_table_with_details,
)
from gpudiag.report.labels import format_bucket_name, pluralize
from gpudiag.units import format_ns, format_share

if TYPE_CHECKING:
    from rich.console import RenderableType

WITHIN = "within these two runs; another run of the same program may differ by more (gpudiag ab measures that)"
NO_P = "no p-value is given: steps of one process resemble their neighbours, and two processes differ even where nothing was changed"

_LISTED = 1e-9
_MARKS: dict[Change, str] = {
    "faster": "faster", "slower": "slower", "new": "new", "gone": "gone", "not_known": "variance unknown", "unchanged": "within noise"
}  # fmt: skip
_MATCHES = {"exact": "", "shapes": "other shapes", "name": "by name", "alone": ""}
_STEPS = {"unprofiled": "unprofiled", "profiled": "profiled", "report": "profiled"}


class ComparisonCell(NamedTuple):
    """What stands in one place of a table; `tone`: good, bad or ''."""

    text: str
    tone: str = ""


class ComparisonTable(NamedTuple):
    """One part of a comparison: its title, columns as (title, 'l' or 'r'), rows and what to know about them."""

    title: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[ComparisonCell, ...], ...]
    notes: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    """A line under each row, '' for none; empty: no row has one."""


def format_comparison_headline(found: StepComparison) -> str:
    """Return the answer in one sentence."""
    if found.same_recording:
        return "A and B are the same recording: nothing can have changed"
    ratio = found.ratio
    if ratio is None:
        return "The steps cannot be compared: one of the recordings has no complete step"
    if ratio.low is None or ratio.high is None:
        return f"In B {describe_ratio_change(ratio.value)}; whether that is more than noise is unknown: {ratio.reason}"
    if found.verdict == "no_difference":
        return f"No difference: the median step changed by {format_ratio_change(ratio.value)}, interval {_format_ratio_span(ratio)}"
    return f"In B {describe_ratio_change(ratio.value)} (interval {_format_ratio_span(ratio)})"


def _format_ratio_span(ratio: StepRatio) -> str:
    return f"{format_ratio_change(ratio.low or 1.0)} to {format_ratio_change(ratio.high or 1.0)}"


def format_interval_meaning(found: StepComparison) -> str:
    """Return what the interval holds, '' where there is none."""
    ratio = found.ratio
    if found.same_recording or ratio is None or ratio.low is None:
        return ""
    return (
        f"The interval ({format_share(ratio.level)}, over {ratio.batches[0]} and {ratio.batches[1]} batches of consecutive "
        f"{_STEPS[ratio.steps]} steps) holds the variance {WITHIN}; {NO_P}."
    )


def format_speed_gate(found: StepComparison) -> str:
    """Return what --fail-if-slower decided and why, '' where it was not asked for."""
    gate = found.gate
    if gate is None:
        return ""
    word = {"passed": "passed", "failed": "FAILED", "within_noise": "passed, within noise", "unknown": "FAILED, unavailable"}[gate.outcome]
    return f"{gate.name}: {word}: {gate.message}"


def build_comparison_tables(found: StepComparison, top: int) -> Iterator[ComparisonTable]:
    """Yield the parts that have something to show, with the `top` ops that changed most."""
    made = (build_runs_table(found), build_parts_table(found), build_ops_table(found, top), build_findings_table(found))
    return (table for table in made if table.rows or table.notes)


def build_runs_table(found: StepComparison) -> ComparisonTable:
    """Return the two runs side by side; their devices where they are not the same, samples a second where those of one are known."""
    sides = (found.a, found.b)
    columns = (("", "l"), ("run", "l"), ("device", "l"), ("steps", "r"), ("median", "r"), ("p95", "r"), ("samples/s", "r"))
    alike = {"device"} if found.a.device == found.b.device else set()
    alike |= {"samples/s"} if all(side.samples_per_s is None for side in sides) else set()
    kept = [place for place, (title, _) in enumerate(columns) if title not in alike]
    rows = [_build_run_row(name, side) for name, side in zip("AB", sides, strict=True)]
    steps = f"median and 95th percentile of the {_STEPS[found.ratio.steps] if found.ratio else 'profiled'} steps"
    note = f"{steps}, on {found.a.device or 'devices that are not known'}" if "device" in alike else steps
    return ComparisonTable(
        "Runs", tuple(columns[place] for place in kept), tuple(tuple(row[place] for place in kept) for row in rows), (note,)
    )


def _build_run_row(name: str, side: RunSide) -> tuple[ComparisonCell, ...]:
    rate = "?" if side.samples_per_s is None else f"{side.samples_per_s:,.4g}"
    figures = (f"{side.steps:,}", format_ns(side.median_ns), format_ns(side.p95_ns), rate)
    return tuple(map(ComparisonCell, (name, side.path, side.device or "not known", *figures)))


def build_parts_table(found: StepComparison) -> ComparisonTable:
    """Return the parts of the step, busy before idle as in the breakdown, and their sum."""
    if not found.parts:
        return ComparisonTable("", (), ())
    kinds = {side.device_kind for side in (found.a, found.b)}
    device = (kinds.pop() or "device").upper() if len(kinds) == 1 else "device"
    labels = {part.name: format_bucket_name(part.name, work="ops" if device == "CPU" else "kernels", device=device) for part in found.parts}
    rows = [_build_part_row(labels[part.name], part.a_ns, part.b_ns) for part in found.parts]
    whole = f"profiled step (mean of {found.a.analysed_steps} and {found.b.analysed_steps})"
    rows.append(_build_part_row(whole, sum(part.a_ns for part in found.parts), sum(part.b_ns for part in found.parts)))
    columns = (("part of the profiled step", "l"), ("A", "r"), ("B", "r"), ("change", "r"))
    return ComparisonTable("Where the step goes", columns, tuple(rows))


def _build_part_row(label: str, a: float, b: float) -> tuple[ComparisonCell, ...]:
    return ComparisonCell(label), ComparisonCell(format_ns(a)), ComparisonCell(format_ns(b)), ComparisonCell(format_change_ns(b - a))


def format_change_ns(delta: float) -> str:
    """Return a difference with its sign."""
    return "0" if abs(delta) < _LISTED else f"{'+' if delta > 0 else ''}{format_ns(delta)}"


def build_ops_table(found: StepComparison, top: int) -> ComparisonTable:
    """Return the ops that changed by more than they vary, or whose variance is not known, the largest change first."""
    changed = [change for change in found.ops if change.change != "unchanged"]
    shown = changed[:top]
    columns = (("op", "l"), ("phase", "l"), ("A", "r"), ("B", "r"), ("change", "r"), ("", "l"))
    rows = tuple(_build_op_row(change) for change in shown)
    return ComparisonTable("Ops, in kernel time a step (mean \u00b1 its standard deviation from step to step)", columns, rows,
                 tuple(_list_op_notes(found, changed, shown)), tuple(_format_op_detail(change) for change in shown))  # fmt: skip


def _build_op_row(change: OpChange) -> tuple[ComparisonCell, ...]:
    tone = {"faster": "good", "gone": "good", "slower": "bad", "new": "bad"}.get(change.change, "")
    spreads = ((change.a_ns, change.a_spread_ns), (change.b_ns, change.b_spread_ns))
    said = ", ".join(word for word in (_MARKS[change.change], _MATCHES[change.matched]) if word)
    return (
        ComparisonCell(format_kernel_name(change.name)),
        ComparisonCell(change.phase or ""),
        *(ComparisonCell(_format_spread(*pair)) for pair in spreads),
        ComparisonCell(format_change_ns(change.delta_ns), tone),
        ComparisonCell(said, tone),
    )


def _format_spread(mean: float | None, spread: float | None) -> str:
    if mean is None:
        return "-"
    return format_ns(mean) if spread is None else f"{format_ns(mean)} \u00b1 {format_ns(spread)}"


def _format_op_detail(change: OpChange) -> str:
    """Return module and shapes, those of both where they differ."""
    shapes = " -> ".join(dict.fromkeys(text for text in (change.signature_a, change.signature_b) if text))
    if change.a_calls is None or change.b_calls is None or abs(change.a_calls - change.b_calls) < _LISTED:
        calls = ""
    else:
        calls = f"{change.a_calls:,.4g} -> {change.b_calls:,.4g} calls a step"
    return ", ".join(text for text in (change.module, shapes, calls) if text)


def _list_op_notes(found: StepComparison, changed: Sequence[OpChange], shown: Sequence[OpChange]) -> Iterator[str]:
    if not found.ops:
        yield "no ops were recorded"
        return
    yield f"in all: {'; '.join(_sum_changes(found.ops))}"
    yield f"aligned: {_format_aligned(found.aligned_a_share)} of the op time of A and {_format_aligned(found.aligned_b_share)} of that of B"
    if len(shown) < len(changed):
        yield f"{len(shown)} of {len(changed):,} changed ops; --top N shows more"
    if any(change.change == "unchanged" for change in found.ops):
        level = format_share(found.op_level)
        yield f"within noise: changed by less than the op varies from step to step (interval of {level}), or by less than 1 % of its time"
    if any(change.change == "not_known" for change in found.ops):
        yield "variance unknown: a report read from a file, or a single step, does not hold how an op varies"


def _sum_changes(changes: Sequence[OpChange]) -> Iterator[str]:
    """Yield how many ops changed in each way, and by how much together."""
    for word, said in _MARKS.items():
        if found := [change.delta_ns for change in changes if change.change == word]:
            yield f"{said} {len(found):,} {pluralize(len(found), 'op')}, {format_change_ns(sum(found))} a step"


def _format_aligned(share: float | None) -> str:
    return "none" if share is None else format_share(share, 1)


def build_findings_table(found: StepComparison) -> ComparisonTable:
    """Return the findings that came, went and stayed."""
    columns = (("", "l"), ("rule", "l"), ("finding", "l"), ("A", "r"), ("B", "r"))
    rows = tuple(_build_finding_row(change) for change in found.findings)
    notes = ("A and B: upper bound of the potential speed-up, as a share of the step",) if rows else ()
    return ComparisonTable("Findings", columns, rows, notes, tuple(_explain_finding_change(change) for change in found.findings))


def _build_finding_row(change: FindingChange) -> tuple[ComparisonCell, ...]:
    unsure = change.change == "went" and change.reason
    tone = {"came": "bad", "went": "" if unsure else "good", "stayed": ""}[change.change]
    ceilings = ((change.a_severity, change.a_ceiling_share), (change.b_severity, change.b_ceiling_share))
    return (
        ComparisonCell(change.change, tone),
        ComparisonCell(change.rule),
        ComparisonCell(change.title),
        *(ComparisonCell(_format_ceiling(*pair)) for pair in ceilings),
    )


def _format_ceiling(severity: str | None, share: float | None) -> str:
    if severity is None:
        return "-"
    return severity if share is None else f"{severity}, {format_share(share, 1)}"


def _explain_finding_change(change: FindingChange) -> str:
    if not change.reason:
        return ""
    said = "not certainly fixed; in B" if change.change == "went" else "in A"
    return f"{said} {change.reason}"


TONE_STYLES = {"good": "green", "bad": "red", "": ""}
_LEAST = {"device": 120, "phase": 100, "p95": 80, "samples/s": 70, "": 60, "median": 50, "A": 50, "B": 50}
"""Width of the terminal from which a column is shown, by its title; others always are."""
_NAMES_IN_TEXT = ("run", "op", "finding", "part of the profiled step")
"""Columns that take what the others leave."""


def render_comparison_text(found: StepComparison, *, width: int = 100, top: int = 15, color: bool = False) -> str:
    """Return the comparison for a terminal of `width` columns with the `top` ops that changed most."""
    console, sink = create_console(width, color)
    print_line(console, format_comparison_headline(found), "bold")
    for said in found.warnings:
        print_line(console, f"! {said}", "yellow")
    for table in build_comparison_tables(found, top):
        print_heading(console, table.title)
        if table.rows:
            kept = _choose_columns(console.width, table)
            made = create_table([(table.columns[place][0], _choose_alignment(table, place)) for place in kept])
            for row in table.rows:
                made.add_row(*(_build_text_cell(row[place].text, row[place].tone) for place in kept))
            print_table_with_details(console, made, _list_row_details(table, kept))
        for note in table.notes:
            print_line(console, note, QUIET)
    if meaning := format_interval_meaning(found):
        console.print()
        print_line(console, meaning, QUIET)
    if gate := format_speed_gate(found):
        console.print()
        print_line(console, gate, "bold red" if found.gate and found.gate.fails else "bold")
    return collect_text(sink)


def _list_row_details(table: ComparisonTable, kept: list[int]) -> list[str]:
    """Return the line under each row: what tells it from others of its name, the phase too where its column is left out."""
    left_out = [place for place, (title, _) in enumerate(table.columns) if title == "phase" and place not in kept]
    details = table.details or ("",) * len(table.rows)
    rows = zip(table.rows, details, strict=True)
    return [clean(", ".join(text for text in (*(row[place].text for place in left_out), detail) if text), 400) for row, detail in rows]


def _choose_columns(width: int, table: ComparisonTable) -> list[int]:
    """Return the columns that are shown, by number."""
    others = [place for place, (title, _) in enumerate(table.columns) if title not in _NAMES_IN_TEXT]
    least = [(table.columns[place][0], 0 if place == 0 else _LEAST.get(table.columns[place][0], 0)) for place in others]
    shown, _ = fit_columns(width, least, [[clean(row[place].text) for place in others] for row in table.rows])
    dropped = {table.columns[place][0] for k, place in enumerate(others) if k not in shown}
    dropped |= {"A", "B"} if dropped & {"A", "B"} else set()  # one without the other compares nothing
    return [place for place, (title, _) in enumerate(table.columns) if place == 0 or title not in dropped]


def _choose_alignment(table: ComparisonTable, place: int) -> str:
    title, side = table.columns[place]
    return "right" if side == "r" else "name" if title in _NAMES_IN_TEXT else "left"


def _build_text_cell(text: str, tone: str) -> RenderableType:
    from rich.text import Text

    return Text(clean(text), style=TONE_STYLES[tone])


_NAMES_IN_MARKDOWN = ("op", "run")
"""Columns whose texts come from a recording or a command line: shown as code."""


def render_comparison_markdown(found: StepComparison, *, top: int = 30) -> str:
    """Return the comparison as Markdown with the `top` ops that changed most."""
    gate = format_speed_gate(found)
    blocks = [
        "# gpudiag compare",
        f"**{escape_markdown(format_comparison_headline(found))}**",
        f"**{escape_markdown(gate)}**" if gate else "",
        "\n".join(f"- **Warning:** {escape_markdown(said)}" for said in found.warnings),
        *(_format_markdown_table(table) for table in build_comparison_tables(found, top)),
        escape_markdown(format_interval_meaning(found)),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _format_markdown_table(table: ComparisonTable) -> str:
    header = [escape_markdown(title) for title, _ in table.columns]
    rule = ["---:" if side == "r" else "---" for _, side in table.columns]
    details = table.details or ("",) * len(table.rows)
    rows = [_format_markdown_row(table, place, details[place]) for place in range(len(table.rows))]
    shown = "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)) if rows else ""
    notes = "\n".join(f"- {escape_markdown(note)}" for note in table.notes)
    return "\n\n".join(text for text in (f"## {escape_markdown(table.title)}", shown, notes) if text)


def _format_markdown_row(table: ComparisonTable, place: int, detail: str) -> list[str]:
    cells = []
    for (title, _), cell in zip(table.columns, table.rows[place], strict=True):
        shown = format_code_span(cell.text, cell=True) if title in _NAMES_IN_MARKDOWN else escape_markdown(cell.text)
        cells.append(f"{shown}<br>{escape_markdown(detail, 300)}" if detail and title in {"op", "finding"} else shown)
    return cells
