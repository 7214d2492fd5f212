"""A comparison of two recordings: its words and tables, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from gpudiag.facts.event_labels import format_kernel_name
from gpudiag.model.comparison import Change, StepComparison
from gpudiag.report.console import (
    QUIET,
    clean,
    collect_text,
    create_console,
    create_table,
    escape_markdown,
    fit_columns,
    format_code_span,
    format_table,
    print_heading,
    print_line,
    print_table_with_details,
)
from gpudiag.report.labels import format_bucket_name, pluralize
from gpudiag.units import describe_ratio_change, format_ns, format_ratio_change, format_share

if TYPE_CHECKING:
    from rich.console import Console

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
    interval = f"interval {format_ratio_change(ratio.low or 1.0)} to {format_ratio_change(ratio.high or 1.0)}"
    if found.verdict == "no_difference":
        return f"No difference: the median step changed by {format_ratio_change(ratio.value)}, {interval}"
    return f"In B {describe_ratio_change(ratio.value)} ({interval})"


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
    alike = {"device"} if found.a.device == found.b.device else set()
    alike |= {"samples/s"} if all(side.samples_per_s is None for side in sides) else set()
    columns = (("", "l"), ("run", "l"), ("device", "l"), ("steps", "r"), ("median", "r"), ("p95", "r"), ("samples/s", "r"))
    kept = [place for place, (title, _) in enumerate(columns) if title not in alike]
    rows = []
    for name, side in zip("AB", sides, strict=True):
        rate = "?" if side.samples_per_s is None else f"{side.samples_per_s:,.4g}"
        figures = (f"{side.steps:,}", format_ns(side.median_ns), format_ns(side.p95_ns), rate)
        texts = (name, side.path, side.device or "not known", *figures)
        rows.append(tuple(ComparisonCell(texts[place]) for place in kept))
    steps = f"median and 95th percentile of the {_STEPS[found.ratio.steps] if found.ratio else 'profiled'} steps"
    note = f"{steps}, on {found.a.device or 'devices that are not known'}" if "device" in alike else steps
    return ComparisonTable("Runs", tuple(columns[place] for place in kept), tuple(rows), (note,))


def build_parts_table(found: StepComparison) -> ComparisonTable:
    """Return the parts of the step, busy before idle as in the breakdown, and their sum."""
    if not found.parts:
        return ComparisonTable("", (), ())
    kinds = {side.device_kind for side in (found.a, found.b)}
    device = (kinds.pop() or "device").upper() if len(kinds) == 1 else "device"
    work = "ops" if device == "CPU" else "kernels"
    times = [(format_bucket_name(part.name, work=work, device=device), part.a_ns, part.b_ns) for part in found.parts]
    whole = f"profiled step (mean of {found.a.analysed_steps} and {found.b.analysed_steps})"
    times.append((whole, sum(part.a_ns for part in found.parts), sum(part.b_ns for part in found.parts)))
    rows = tuple(tuple(map(ComparisonCell, (label, format_ns(a), format_ns(b), format_change_ns(b - a)))) for label, a, b in times)
    return ComparisonTable("Where the step goes", (("part of the profiled step", "l"), ("A", "r"), ("B", "r"), ("change", "r")), rows)


def format_change_ns(delta: float) -> str:
    """Return a difference with its sign."""
    return "0" if abs(delta) < _LISTED else f"{'+' if delta > 0 else ''}{format_ns(delta)}"


def build_ops_table(found: StepComparison, top: int) -> ComparisonTable:
    """Return the ops that changed by more than they vary, or whose variance is not known, the largest change first."""
    changed = [change for change in found.ops if change.change != "unchanged"]
    rows, details = [], []
    for change in changed[:top]:
        tone = {"faster": "good", "gone": "good", "slower": "bad", "new": "bad"}.get(change.change, "")
        times = [
            "-" if mean is None else format_ns(mean) if spread is None else f"{format_ns(mean)} \u00b1 {format_ns(spread)}"
            for mean, spread in ((change.a_ns, change.a_spread_ns), (change.b_ns, change.b_spread_ns))
        ]
        said = ", ".join(word for word in (_MARKS[change.change], _MATCHES[change.matched]) if word)
        texts = (format_kernel_name(change.name), change.phase or "", *times)
        rows.append((*map(ComparisonCell, texts), ComparisonCell(format_change_ns(change.delta_ns), tone), ComparisonCell(said, tone)))
        # Module and shapes, those of both where they differ
        shapes = " -> ".join(dict.fromkeys(text for text in (change.signature_a, change.signature_b) if text))
        calls = ""
        if change.a_calls is not None and change.b_calls is not None and abs(change.a_calls - change.b_calls) >= _LISTED:
            calls = f"{change.a_calls:,.4g} -> {change.b_calls:,.4g} calls a step"
        details.append(", ".join(text for text in (change.module, shapes, calls) if text))
    columns = (("op", "l"), ("phase", "l"), ("A", "r"), ("B", "r"), ("change", "r"), ("", "l"))
    return ComparisonTable("Ops, in kernel time a step (mean \u00b1 its standard deviation from step to step)", columns, tuple(rows),
                 tuple(_list_op_notes(found, len(changed), len(rows))), tuple(details))  # fmt: skip


def _list_op_notes(found: StepComparison, changed: int, shown: int) -> Iterator[str]:
    if not found.ops:
        yield "no ops were recorded"
        return
    sums = []
    for word, said in _MARKS.items():
        if deltas := [change.delta_ns for change in found.ops if change.change == word]:
            sums.append(f"{said} {len(deltas):,} {pluralize(len(deltas), 'op')}, {format_change_ns(sum(deltas))} a step")
    yield f"in all: {'; '.join(sums)}"
    a, b = ("none" if share is None else format_share(share, 1) for share in (found.aligned_a_share, found.aligned_b_share))
    yield f"aligned: {a} of the op time of A and {b} of that of B"
    if shown < changed:
        yield f"{shown} of {changed:,} changed ops; --top N shows more"
    if any(change.change == "unchanged" for change in found.ops):
        level = format_share(found.op_level)
        yield f"within noise: changed by less than the op varies from step to step (interval of {level}), or by less than 1 % of its time"
    if any(change.change == "not_known" for change in found.ops):
        yield "variance unknown: a report read from a file, or a single step, does not hold how an op varies"


def build_findings_table(found: StepComparison) -> ComparisonTable:
    """Return the findings that came, went and stayed."""
    rows, details = [], []
    for change in found.findings:
        unsure = change.change == "went" and change.reason
        tone = {"came": "bad", "went": "" if unsure else "good", "stayed": ""}[change.change]
        ceilings = [
            "-" if severity is None else severity if share is None else f"{severity}, {format_share(share, 1)}"
            for severity, share in ((change.a_severity, change.a_ceiling_share), (change.b_severity, change.b_ceiling_share))
        ]
        rows.append((ComparisonCell(change.change, tone), *map(ComparisonCell, (change.rule, change.title, *ceilings))))
        details.append(f"{'not certainly fixed; in B' if unsure else 'in A'} {change.reason}" if change.reason else "")
    columns = (("", "l"), ("rule", "l"), ("finding", "l"), ("A", "r"), ("B", "r"))
    notes = ("A and B: upper bound of the potential speed-up, as a share of the step",) if rows else ()
    return ComparisonTable("Findings", columns, tuple(rows), notes, tuple(details))


TONE_STYLES = {"good": "green", "bad": "red", "": ""}
_LEAST = {"device": 120, "phase": 100, "p95": 80, "samples/s": 70, "": 60, "median": 50, "A": 50, "B": 50}
"""Width of the terminal from which a column is shown, by its title; others always are."""
_NAMES_IN_TEXT = ("run", "op", "finding", "part of the profiled step")


def render_comparison_text(found: StepComparison, *, width: int = 100, top: int = 15, color: bool = False) -> str:
    """Return the comparison for a terminal of `width` columns with the `top` ops that changed most."""
    console, sink = create_console(width, color)
    print_line(console, format_comparison_headline(found), "bold")
    for said in found.warnings:
        print_line(console, f"! {said}", "yellow")
    for table in build_comparison_tables(found, top):
        print_heading(console, table.title)
        if table.rows:
            _print_comparison_table(console, table)
        for note in table.notes:
            print_line(console, note, QUIET)
    if meaning := format_interval_meaning(found):
        console.print()
        print_line(console, meaning, QUIET)
    if gate := format_speed_gate(found):
        console.print()
        print_line(console, gate, "bold red" if found.gate and found.gate.fails else "bold")
    return collect_text(sink)


def _print_comparison_table(console: Console, table: ComparisonTable) -> None:
    from rich.text import Text

    titles = [title for title, _ in table.columns]
    others = [place for place, title in enumerate(titles) if title not in _NAMES_IN_TEXT]
    least = [(titles[place], 0 if place == 0 else _LEAST.get(titles[place], 0)) for place in others]
    shown, _ = fit_columns(console.width, least, [[clean(row[place].text) for place in others] for row in table.rows])
    dropped = {titles[place] for k, place in enumerate(others) if k not in shown}
    dropped |= {"A", "B"} if dropped & {"A", "B"} else set()  # one without the other compares nothing
    kept = [place for place, title in enumerate(titles) if place == 0 or title not in dropped]
    aligns = ["right" if side == "r" else "name" if title in _NAMES_IN_TEXT else "left" for title, side in table.columns]
    printed = create_table([(titles[place], aligns[place]) for place in kept])
    left_out = [place for place, title in enumerate(titles) if title == "phase" and place not in kept]
    details = []
    for row, detail in zip(table.rows, table.details or ("",) * len(table.rows), strict=True):
        printed.add_row(*(Text(clean(row[place].text), style=TONE_STYLES[row[place].tone]) for place in kept))
        details.append(clean(", ".join(text for text in (*(row[place].text for place in left_out), detail) if text), 400))
    print_table_with_details(console, printed, details)


def render_comparison_markdown(found: StepComparison, *, top: int = 30) -> str:
    """Return the comparison as Markdown with the `top` ops that changed most."""
    gate = format_speed_gate(found)
    blocks = [
        "# gpudiag compare",
        f"**{escape_markdown(format_comparison_headline(found))}**",
        f"**{escape_markdown(gate)}**" if gate else "",
        "\n".join(f"- **Warning:** {escape_markdown(said)}" for said in found.warnings),
    ]
    for table in build_comparison_tables(found, top):
        titles, aligns, lines = [escape_markdown(title) for title, _ in table.columns], "".join(side for _, side in table.columns), []
        for row, detail in zip(table.rows, table.details or ("",) * len(table.rows), strict=True):
            cells = []
            for (title, _), cell in zip(table.columns, row, strict=True):
                # Columns whose texts come from a recording or a command line: shown as code
                text = format_code_span(cell.text, cell=True) if title in ("op", "run") else escape_markdown(cell.text)
                cells.append(f"{text}<br>{escape_markdown(detail, 300)}" if detail and title in {"op", "finding"} else text)
            lines.append(cells)
        blocks.append(f"## {escape_markdown(table.title)}")
        blocks.append(format_table(titles, aligns, lines) if table.rows else "")
        blocks.append("\n".join(f"- {escape_markdown(note)}" for note in table.notes))
    blocks.append(escape_markdown(format_interval_meaning(found)))
    return "\n\n".join(block for block in blocks if block) + "\n"
