"""A report for the terminal: verdict, breakdown, idle time, findings, data quality, top ops by time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpudiag.model.finding import Finding
from gpudiag.model.report import OpRow, ReportData
from gpudiag.report import data_quality, environment, findings, idle_time, labels, memory, rank_tables, whole_run
from gpudiag.report.console import (
    QUIET,
    WIDEST_PROSE,
    clean,
    clean_unbroken,
    collect_text,
    create_console,
    create_table,
    fit_columns,
    format_cells,
    print_heading,
    print_item,
    print_line,
    print_table,
    print_table_with_details,
    shorten_middle,
    shorten_path,
)
from gpudiag.report.labels import build_op_namer, format_op_detail, format_phase
from gpudiag.units import format_ns, format_share

if TYPE_CHECKING:
    from rich.console import Console

_BAR_CELLS, _LEAST_BAR = 48, 8
"""Characters of the longest bar; where there is room for fewer than the second, bars show nothing and are left out."""
_FIGURES = 22
"""Columns that time, share and the space between them take."""
# Blue / orange / grey stay apart in every common colour blindness; the words carry the meaning without them.
_STYLES = {"compute": "blue", "memory": "cyan", "overhead": "yellow", "unknown": "bright_black"}
_SEVERITIES = {"critical": "bold red", "warning": "bold yellow", "info": "bold blue"}
_INDENT = 3
_IN_FULL = (2, 3)
_IN_BRIEF = (1, 1)
"""Places and fixes that are shown of the first finding, and of those behind it: what to do first must not scroll away."""
_LONGEST_PATH = 200
_LONGEST_REASON = 1_000
_LONGEST_COMMAND = 8_000
_NARROW = 60
"""Columns below which a table drops what is not needed to act on it."""
_ROOMY = 92
"""Columns from which the op table has room for bandwidth and intensity too."""


def render_text(
    report: ReportData, *, width: int = 100, top: int = 10, color: bool = False, everything: bool = False, script: str | None = ""
) -> str:
    """Return the report as text of at most `width` columns; `top` ops; `color`: with ANSI colours; `everything`: all findings in full.

    `script`: the recorded program and its arguments, for the command that tries the fixes; '' where not known, None: no command is named.
    Beyond WIDEST_PROSE columns only the table of ops is wider.
    """
    console, sink = create_console(min(width, WIDEST_PROSE), color)
    _print_title(console, report)
    _print_breakdown(console, report)
    rank_tables.print_ranks(console, report, top)
    _print_findings(console, report, everything, script)
    # Print where the device was idle and why, the calls that wait for it, how far the host is ahead, and the critical path
    found = idle_time.list_idle_causes(report)
    if found:
        _print_causes(console, report, found)
    _print_waiting_calls(console, report)
    lines = [text for text in (idle_time.format_queue(report), idle_time.format_critical_path(report)) if text]
    if lines:
        console.print()
    for text in lines:
        print_line(console, text)
    _print_what_ifs(console, report)
    if report.experiments:
        from gpudiag.report.experiment.terminal import print_experiments  # here: most reports hold none

        print_experiments(console, report.experiments)
    whole_run.print_history(console, report)
    memory.print_memory(console, report.memory)
    _print_quality(console, report)
    print_top_ops(console, report, top, width)
    _print_environment(console, report)
    console.print()
    print_line(console, labels.format_rule_counts(report), QUIET)
    for said in data_quality.list_suppression_reasons(report) if everything else data_quality.list_suppressed_rules(report):
        print_line(console, clean(said, _LONGEST_REASON), QUIET)
    print_line(console, "A rule in full: gpudiag rules show ID. Everything as one page: gpudiag report PATH -o report.html", QUIET)
    return collect_text(sink)


def _print_title(console: Console, report: ReportData) -> None:
    device = report.device.name if report.device else "an unknown device"
    print_line(console, f"{report.tool.name} {report.tool.version} on {clean(device, 80)}", QUIET)
    print_line(console, shorten_path(clean(report.source.path, 4_096), _LONGEST_PATH), QUIET)
    console.print()
    print_line(console, labels.format_verdict(report), "bold")
    for said in data_quality.format_headlines(report):
        print_line(console, said)


def _print_breakdown(console: Console, report: ReportData) -> None:
    from rich.text import Text

    rows = labels.build_bucket_rows(report)
    if not rows:
        return
    print_heading(console, f"Where {labels.format_span(report)} goes")
    largest = max(row.share for row in rows)
    room = min(_BAR_CELLS, console.width - max(len(row.label) for row in rows) - _FIGURES)
    narrow = console.width < _NARROW or room < 0
    room = 0 if narrow or room < _LEAST_BAR else room
    table = create_table((("", "wrapped" if narrow else "left"), ("time", "right"), ("share", "right"), ("", "left")))
    for row in rows:
        bar = "█" * round(room * row.share / largest)
        style = "magenta" if row.idle else _STYLES.get(row.bucket, "green")
        table.add_row(*format_cells(row.label, format_ns(row.ns), format_share(row.share, 1)), Text(bar, style=style))
    table.add_row(
        *format_cells(f"sum: the {labels.name_span(report)}", format_ns(labels.step_ns(report)), format_share(1, 1)), style="bold"
    )
    print_table(console, table)
    if note := labels.format_idle_note(report):
        print_line(console, note, QUIET)


def _print_causes(console: Console, report: ReportData, found: list[idle_time.IdleCause]) -> None:
    """Print each cause with its places below it, then what the names mean."""
    from rich.padding import Padding
    from rich.text import Text

    print_heading(console, f"Why the {labels.name_device(report)} was idle")
    table = create_table((("cause, call site", "wrapped"), ("time", "right"), ("share", "right")))
    for cause in found:
        table.add_row(*format_cells(clean(cause.label), format_ns(cause.ns), format_share(cause.share, 1)))
        for place in cause.places:
            where = Padding(Text(clean(place.detail, 400), style=QUIET), (0, 0, 0, 2))
            figures = (
                ("", "")
                if (len(cause.places) == 1 and format_ns(cause.places[0].ns) == format_ns(cause.ns))
                else (format_ns(place.ns), format_share(place.share, 1))
            )
            table.add_row(where, *(Text(text, style=QUIET) for text in figures))
    print_table(console, table)
    if said := idle_time.format_cause_meanings(found):
        print_line(console, said, QUIET)


def _print_waiting_calls(console: Console, report: ReportData) -> None:
    found = idle_time.list_waiting_calls(report)
    if not found:
        return
    print_heading(console, f"Calls that synchronise, in {labels.format_span(report)}")
    table = create_table((("call", "name"), ("calls", "right"), ("host time", "right"), ("exposed", "right")))
    for row in found:
        table.add_row(*format_cells(clean(idle_time.name_call(row), 100), *idle_time.format_call_figures(row, report)))
    print_table_with_details(console, table, [clean(idle_time.format_row_site(row), 400) for row in found])


def _print_what_ifs(console: Console, report: ReportData) -> None:
    """Print what the replay gives for each cost taken away, with the name by which a reader can try it."""
    found = idle_time.list_what_if_changes(report)
    if not found:
        return
    print_heading(console, f"What-if: potential speed-up (the {labels.name_span(report)} replayed with one thing changed)")
    span, roomy = labels.name_span(report), console.width >= _ROOMY
    settings = (("--set", "left"),) if roomy else ()
    table = create_table((("change", "wrapped"), *settings, (span, "right"), ("gain", "right")))
    for change in found:
        label = change.label if roomy or console.width < _NARROW else f"{change.label}, {change.setting}"
        table.add_row(*format_cells(clean(label, 160), *([clean(change.setting, 100)] if roomy else []), change.then, change.gain))
    print_table(console, table)
    print_line(console, "More, and several at once: gpudiag whatif PATH --set NAME=VALUE", QUIET)


def _print_findings(console: Console, report: ReportData, everything: bool, script: str | None) -> None:
    """Print the first findings, the first of them with most detail, and the others in one line each; with `everything` all in full."""
    found, rest = findings.split_findings(report)
    if everything:
        found, rest = (*found, *rest), ()
    if not found:
        print_heading(console, "Findings")
        print_line(console, labels.format_nothing_found(report))
        return
    print_heading(console, "Top findings")
    for number, finding in enumerate(found, 1):
        if number > 1:
            console.print()
        _print_finding(console, number, finding, report, _IN_FULL if everything or number == 1 else _IN_BRIEF)
        _print_symptoms(console, finding, report, everything)
    if rest:
        console.print()
        print_line(console, f"And {len(rest)} more (in full: gpudiag report PATH --all-findings):")
    for number, finding in enumerate(rest, len(found) + 1):
        print_item(console, f"{number}. ", clean(findings.format_finding_brief(finding), 200), indent=_INDENT)
    if said := findings.explain_gains(report):
        print_line(console, said, QUIET)
    if script is not None and (command := findings.build_ab_command(report, clean(script, _LONGEST_COMMAND))):
        print_line(console, f"Measure it before you change the code: {command}")


def _print_symptoms(console: Console, finding: Finding, report: ReportData, everything: bool) -> None:
    """Print the symptoms of `finding`: their ids, or with `everything` what each says."""
    symptoms = findings.list_symptoms(finding, report)
    if symptoms and not everything:
        print_line(console, f"Also explains: {clean(', '.join(rule for rule, _ in symptoms), 400)}.", QUIET, _INDENT)
    for rule, said in symptoms if everything else ():
        print_line(console, f"Also explains {clean(rule, 40)}: {said}", QUIET, _INDENT)


def _print_finding(console: Console, number: int, finding: Finding, report: ReportData, most: tuple[int, int]) -> None:
    """Print a finding with the first places and fixes: at most as many as `most` says."""
    from rich.text import Text

    severity = (finding.severity, _SEVERITIES.get(finding.severity, ""))
    print_item(
        console, f"{number}. ", Text.assemble((clean(finding.title, 100), "bold"), "  ", severity, (f"  {clean(finding.rule, 40)}", QUIET))
    )
    print_line(console, finding.message, indent=_INDENT)
    print_line(console, f"{labels.format_upper_bound(finding, report)} Confidence: {finding.confidence}.".strip(), "bold", _INDENT)
    for place in findings.select_places(finding, report, most[0]):
        print_line(console, f"Where: {clean(labels.format_place(place, report))}", indent=_INDENT)
    if not finding.fixes and finding.why:
        print_line(console, f"Note: {clean(finding.why, _LONGEST_REASON)}", indent=_INDENT)
    for title_text, change, effect in labels.list_fix_lines(finding)[: most[1]]:
        print_line(console, f"Try: {title_text}" + (f" ({effect})" if effect else ""), indent=_INDENT)
        if change:
            print_line(console, change, "cyan", _INDENT + 5)


def _print_quality(console: Console, report: ReportData) -> None:
    print_heading(console, "Data quality")
    table = create_table((("", "left"), ("", "wrapped")))
    for topic, said in (*data_quality.list_quality_lines(report), ("published", "; ".join(data_quality.list_mfu_references(report)))):
        if said:
            table.add_row(*format_cells(topic, clean_unbroken(said)))
    print_table(console, table)
    for warning in data_quality.list_warnings(report):
        print_item(console, "! ", warning, "yellow")


def _print_environment(console: Console, report: ReportData) -> None:
    found = environment.list_environment(report)
    if not found:
        return
    print_heading(console, "Environment")
    table = create_table((("", "left"), ("", "wrapped")))
    for topic, said in found:
        table.add_row(*format_cells(topic, clean_unbroken(clean(said, environment.LONGEST_ENVIRONMENT_TEXT))))
    print_table(console, table)


_BESIDE = 150
"""Columns from which call site and shapes stand beside the figures: an op then takes one line."""
_LONGEST_BESIDE = 0.4
"""Share of the room for name and details that the name takes at most, where both stand in one line."""
_LONGEST_DETAIL = 400
_OPS_INDENT = 2
"""Of a detail below its op."""


def print_top_ops(console: Console, report: ReportData, top: int, width: int) -> None:
    """Print the `top` ops by time, `width` columns wide; nothing where there is none."""
    rows = sorted(report.ops, key=lambda row: -row.kernel_ns)[: max(0, top)]
    if not rows:
        return
    print_heading(console, f"Top ops by time ({len(rows)} of {len(report.ops)}, over {_format_window(report)})")
    total, name = labels.sum_op_ns(report.ops), build_op_namer(report)
    columns, figures = _build_op_figures(report, rows, total)
    kept, room = fit_columns(width, [(title, least) for title, _, least in columns], figures)
    beside = width >= _BESIDE
    details = [clean(format_op_detail(row), _LONGEST_DETAIL) for row in rows]
    names = [
        clean(name(row) if detail or not row.phase else f"{name(row)}, {format_phase(row)}")
        for row, detail in zip(rows, details, strict=True)
    ]
    longest = int(room * _LONGEST_BESIDE) if beside else room
    table = create_table(
        (("op", "left" if beside else "name"), *(columns[k][:2] for k in kept), *((("call site, shapes", "name"),) if beside else ()))
    )
    for called, row, detail in zip(names, figures, details, strict=True):
        table.add_row(*format_cells(shorten_middle(called, longest), *(row[k] for k in kept), *([detail] if beside else [])))
    before, console.width = console.width, max(width, console.width)
    print_table_with_details(
        console, table, [""] * len(rows) if beside else [shorten_middle(detail, width - _OPS_INDENT) for detail in details]
    )
    console.width = before
    for said in labels.format_op_legend(rows):
        print_line(console, said, QUIET)


def _build_op_figures(report: ReportData, rows: list[OpRow], total_ns: int) -> tuple[list[tuple[str, str, int]], list[list[str]]]:
    """Return the columns (title, alignment, least width of the terminal) and the cells of each row."""
    flop, byte = labels.choose_flop_unit(report, rows), labels.choose_byte_unit(report, rows)
    columns = [
        ("calls", "right", 70),
        ("time", "right", 0),
        ("share", "right", 60),
        ("bound", "left", 0),
        ("of roofline", "right", 0),
        (flop[0], "right", 75),
        (byte[0], "right", 92),
        ("FLOP/B", "right", 100),
    ]
    return columns, [_format_op_cells(row, total_ns, flop[1], byte[1]) for row in rows]


def _format_op_cells(row: OpRow, total_ns: int, flop_factor: float, byte_factor: float) -> list[str]:
    """Return the figures of one op in the order of their columns."""
    return [
        f"{row.count:,}",
        format_ns(row.kernel_ns),
        format_share(row.kernel_ns / total_ns if total_ns else None, 1),
        row.bound,
        labels.format_efficiency(row),
        labels.format_number(labels.compute_rate(row.flops, row.kernel_ns), flop_factor),
        labels.format_number(labels.compute_rate(row.bytes, row.kernel_ns), byte_factor),
        labels.format_number(labels.compute_intensity(row), 1),
    ]


def _format_window(report: ReportData) -> str:
    if not labels.has_steps(report):
        return "the recorded window"
    return "1 step" if report.steps.count == 1 else f"{report.steps.count} steps"
