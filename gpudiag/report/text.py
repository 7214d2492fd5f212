"""A report for the terminal: verdict, breakdown, idle time, findings, data quality, top ops by time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpudiag.model.finding import Finding
from gpudiag.model.report import ReportData
from gpudiag.report import data_quality, environment, findings, idle_time, labels, memory, rank_tables, whole_run
from gpudiag.report.console import (
    QUIET,
    WIDEST_PROSE,
    clean,
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
    print_topics,
    shorten_middle,
    shorten_path,
)
from gpudiag.report.labels import build_op_namer, format_op_detail, format_phase
from gpudiag.units import format_ns, format_share

if TYPE_CHECKING:
    from rich.console import Console

_BAR_CELLS, _LEAST_BAR = 48, 8
"""Characters of the longest bar; where there is room for fewer than the second, bars show nothing and are left out."""
# Blue / orange / grey stay apart in every common colour blindness; the words carry the meaning without them.
_STYLES = {"compute": "blue", "memory": "cyan", "overhead": "yellow", "unknown": "bright_black"}
_SEVERITIES = {"critical": "bold red", "warning": "bold yellow", "info": "bold blue"}
_INDENT = 3
_LONGEST_PATH = 200
_LONGEST_REASON = 1_000
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
    device = report.device.name if report.device else "an unknown device"
    print_line(console, f"{report.tool.name} {report.tool.version} on {clean(device, 80)}", QUIET)
    print_line(console, shorten_path(clean(report.source.path, 4_096), _LONGEST_PATH), QUIET)
    console.print()
    print_line(console, labels.format_verdict(report), "bold")
    for said in data_quality.format_headlines(report):
        print_line(console, said)
    _print_breakdown(console, report)
    rank_tables.print_ranks(console, report, top)
    _print_findings(console, report, everything, script)
    _print_idle_time(console, report)
    _print_what_ifs(console, report)
    if report.experiments:
        from gpudiag.report.experiment.summary import format_experiments_legend  # here: most reports hold none
        from gpudiag.report.experiment.terminal import print_outcomes

        print_outcomes(console, report.experiments)
        for meaning in format_experiments_legend(report.experiments):
            print_line(console, meaning, QUIET)
    if history := whole_run.list_history(report.history):
        print_heading(console, whole_run.WHOLE_RUN_TITLE)
        for said in history:
            print_line(console, said)
    memory.print_memory(console, report.memory)
    print_heading(console, "Data quality")
    published = ("published", "; ".join(data_quality.list_mfu_references(report)))
    print_topics(console, [(topic, said) for topic, said in (*data_quality.list_quality_lines(report), published) if said])
    for warning in data_quality.list_warnings(report):
        print_item(console, "! ", warning, "yellow")
    print_top_ops(console, report, top, width)
    if recorded := environment.list_environment(report):
        print_heading(console, "Environment")
        print_topics(console, [(topic, clean(said, environment.LONGEST_ENVIRONMENT_TEXT)) for topic, said in recorded])
    console.print()
    print_line(console, labels.format_rule_counts(report), QUIET)
    for said in data_quality.list_suppressed_rules(report, reasons=everything):
        print_line(console, clean(said, _LONGEST_REASON), QUIET)
    print_line(console, "A rule in full: gpudiag rules show ID. Everything as one page: gpudiag report PATH -o report.html", QUIET)
    return collect_text(sink)


def _print_breakdown(console: Console, report: ReportData) -> None:
    from rich.text import Text

    rows = labels.build_bucket_rows(report)
    if not rows:
        return
    print_heading(console, f"Where {labels.format_span(report)} goes")
    largest = max(row.share for row in rows)
    room = min(_BAR_CELLS, console.width - max(len(row.label) for row in rows) - 22)  # what time, share and the space between take
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


def _print_idle_time(console: Console, report: ReportData) -> None:
    from rich.padding import Padding
    from rich.text import Text

    if causes := idle_time.list_idle_causes(report):
        print_heading(console, f"Why the {labels.name_device(report)} was idle")
        table = create_table((("cause, call site", "wrapped"), ("time", "right"), ("share", "right")))
        for cause in causes:
            time = format_ns(cause.ns)
            table.add_row(*format_cells(clean(cause.label), time, format_share(cause.share, 1)))
            for place in cause.places:
                alone = len(cause.places) == 1 and format_ns(place.ns) == time  # the same figures stand above it
                figures = ("", "") if alone else (format_ns(place.ns), format_share(place.share, 1))
                where = Padding(Text(clean(place.detail, 400), style=QUIET), (0, 0, 0, 2))
                table.add_row(where, *(Text(text, style=QUIET) for text in figures))
        print_table(console, table)
        if meanings := idle_time.format_cause_meanings(causes):
            print_line(console, meanings, QUIET)
    if calls := idle_time.list_waiting_calls(report):
        print_heading(console, f"Calls that synchronise, in {labels.format_span(report)}")
        table = create_table((("call", "name"), ("calls", "right"), ("host time", "right"), ("exposed", "right")))
        for row in calls:
            table.add_row(*format_cells(clean(idle_time.name_call(row), 100), *idle_time.format_call_figures(row, report)))
        print_table_with_details(console, table, [clean(idle_time.format_row_site(row), 400) for row in calls])
    lines = [text for text in (idle_time.format_queue(report), idle_time.format_critical_path(report)) if text]
    if lines:
        console.print()
    for text in lines:
        print_line(console, text)


def _print_what_ifs(console: Console, report: ReportData) -> None:
    changes = idle_time.list_what_if_changes(report)
    if not changes:
        return
    span, roomy = labels.name_span(report), console.width >= _ROOMY
    print_heading(console, f"What-if: potential speed-up (the {span} replayed with one thing changed)")
    table = create_table((("change", "wrapped"), *((("--set", "left"),) if roomy else ()), (span, "right"), ("gain at most", "right")))
    for change in changes:
        label = change.label if roomy or console.width < _NARROW else f"{change.label}, {change.setting}"
        table.add_row(*format_cells(clean(label, 160), *([clean(change.setting, 100)] if roomy else []), change.then, change.gain))
    print_table(console, table)
    print_line(console, "More, and several at once: gpudiag whatif PATH --set NAME=VALUE", QUIET)


def _print_findings(console: Console, report: ReportData, everything: bool, script: str | None) -> None:
    full, rest = findings.split_findings(report)
    if everything:
        full, rest = (*full, *rest), ()
    if not full:
        print_heading(console, "Findings")
        print_line(console, labels.format_nothing_found(report))
        return
    print_heading(console, "Top findings")
    for number, finding in enumerate(full, 1):
        if number > 1:
            console.print()
        _print_finding(console, number, finding, report, everything)
    if rest:
        console.print()
        print_line(console, f"And {len(rest)} more (in full: gpudiag report PATH --all-findings):")
    for number, finding in enumerate(rest, len(full) + 1):
        print_item(console, f"{number}. ", clean(findings.format_finding_brief(finding), 200), indent=_INDENT)
    if said := findings.explain_gains(report):
        print_line(console, said, QUIET)
    if script is not None and (command := findings.build_ab_command(report, clean(script, 8_000))):
        print_line(console, f"Measure it before you change the code: {command}")


def _print_finding(console: Console, number: int, finding: Finding, report: ReportData, everything: bool) -> None:
    from rich.text import Text

    # Places and fixes that are shown of the first finding, and of those behind it: what to do first must not scroll away
    most_places, most_fixes = (2, 3) if everything or number == 1 else (1, 1)
    severity = (finding.severity, _SEVERITIES.get(finding.severity, ""))
    title = Text.assemble((clean(finding.title, 100), "bold"), "  ", severity, (f"  {clean(finding.rule, 40)}", QUIET))
    print_item(console, f"{number}. ", title)
    print_line(console, finding.message, indent=_INDENT)
    print_line(console, f"{labels.format_upper_bound(finding, report)} Confidence: {finding.confidence}.".strip(), "bold", _INDENT)
    for place in findings.select_places(finding, report, most_places):
        print_line(console, f"Where: {clean(labels.format_place(place, report))}", indent=_INDENT)
    if not finding.fixes and finding.why:
        print_line(console, f"Note: {clean(finding.why, _LONGEST_REASON)}", indent=_INDENT)
    for fix, change, effect in labels.list_fix_lines(finding)[:most_fixes]:
        print_line(console, f"Try: {fix}" + (f" ({effect})" if effect else ""), indent=_INDENT)
        if change:
            print_line(console, change, "cyan", _INDENT + 5)
    symptoms = findings.list_symptoms(finding, report)
    if symptoms and not everything:
        print_line(console, f"Also explains: {clean(', '.join(rule for rule, _ in symptoms), 400)}.", QUIET, _INDENT)
    for rule, said in symptoms if everything else ():
        print_line(console, f"Also explains {clean(rule, 40)}: {said}", QUIET, _INDENT)


_BESIDE = 150
"""Columns from which call site and shapes stand beside the figures: an op then takes one line."""
_LONGEST_DETAIL = 400


def print_top_ops(console: Console, report: ReportData, top: int, width: int) -> None:
    """Print the `top` ops by time, `width` columns wide; nothing where there is none."""
    rows = sorted(report.ops, key=lambda row: -row.kernel_ns)[: max(0, top)]
    if not rows:
        return
    count = report.steps.count
    span = ("1 step" if count == 1 else f"{count} steps") if labels.has_steps(report) else "the recorded window"
    print_heading(console, f"Top ops by time ({len(rows)} of {len(report.ops)}, over {span})")
    # The figures: (title, alignment, least width of the terminal), and the cells of each op
    flop, byte = labels.choose_op_units(report, rows)
    columns = [("calls", "right", 70), ("time", "right", 0), ("share", "right", 60), ("bound", "left", 0), ("of roofline", "right", 0),
               (flop[0], "right", 75), (byte[0], "right", 92), ("FLOP/B", "right", 100)]  # fmt: skip
    total, name = labels.sum_op_ns(report.ops), build_op_namer(report)
    figures = [
        [
            *labels.format_op_figures(row, total),
            labels.format_number(labels.compute_rate(row.flops, row.kernel_ns), flop[1]),
            labels.format_number(labels.compute_rate(row.bytes, row.kernel_ns), byte[1]),
            labels.format_number(labels.compute_intensity(row)),
        ]
        for row in rows
    ]
    kept, room = fit_columns(width, [(title, least) for title, _, least in columns], figures)
    # Name, figures, and what tells ops of one name apart: beside them, or below where the terminal is narrow
    beside = width >= _BESIDE
    # Share of the room for name and details that the name takes at most, where both stand in one line
    longest = int(room * 0.4) if beside else room
    table = create_table(
        (("op", "left" if beside else "name"), *(columns[k][:2] for k in kept), *((("call site, shapes", "name"),) if beside else ()))
    )
    details = [clean(format_op_detail(row), _LONGEST_DETAIL) for row in rows]
    for row, cells, detail in zip(rows, figures, details, strict=True):
        called = clean(name(row) if detail or not row.phase else f"{name(row)}, {format_phase(row)}")
        table.add_row(*format_cells(shorten_middle(called, longest), *(cells[k] for k in kept), *([detail] if beside else [])))
    before, console.width = console.width, max(width, console.width)
    print_table_with_details(console, table, ["" if beside else shorten_middle(detail, width - 2) for detail in details])
    console.width = before
    for said in labels.format_op_legend(rows):
        print_line(console, said, QUIET)
