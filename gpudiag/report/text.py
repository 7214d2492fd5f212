"""A report for the terminal: the verdict first, then why, what to try, how far to trust it, and the ops that cost most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpudiag.model.finding import Finding
from gpudiag.model.report import ReportData
from gpudiag.report import chosen, history, memory, proving, ranks_text, recorded, textops, trust, unsaid, waiting, words
from gpudiag.report.console import (
    QUIET,
    WIDEST_PROSE,
    cells,
    finished,
    heading,
    item,
    line,
    new_console,
    new_table,
    print_table,
    print_with_details,
    unbroken,
)
from gpudiag.report.escape import clean, tail
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


def render(
    report: ReportData, *, width: int = 100, top: int = 10, color: bool = False, everything: bool = False, script: str | None = ""
) -> str:
    """Return the report as text of at most `width` columns; `top` ops; `color`: with ANSI colours; `everything`: all findings in full.

    `script`: the recorded program and its arguments, for the command that tries the fixes; '' where not known, None: no command is named.
    Beyond WIDEST_PROSE columns only the table of ops is wider.
    """
    console, sink = new_console(min(width, WIDEST_PROSE), color)
    _title(console, report)
    _breakdown(console, report)
    ranks_text.section(console, report, top)
    _findings(console, report, everything, script)
    _waiting(console, report)
    _changes(console, report)
    _experiments(console, report)
    history.section(console, report)
    memory.section(console, report.memory)
    _trust(console, report)
    textops.section(console, report, top, width)
    _recorded(console, report)
    console.print()
    line(console, words.rules_line(report), QUIET)
    for said in unsaid.reasons(report) if everything else unsaid.lines(report):
        line(console, clean(said, _LONGEST_REASON), QUIET)
    line(console, "A rule in full: gpudiag rules show ID. Everything, as one page: gpudiag report PATH -o report.html", QUIET)
    return finished(sink)


def _experiments(console: Console, report: ReportData) -> None:
    if report.experiments:
        from gpudiag.report.experiment.text import section  # here: most reports hold none

        section(console, report.experiments)


def _title(console: Console, report: ReportData) -> None:
    device = report.device.name if report.device else "an unknown device"
    line(console, f"{report.tool.name} {report.tool.version} on {clean(device, 80)}", QUIET)
    line(console, tail(clean(report.source.path, 4_096), _LONGEST_PATH), QUIET)
    console.print()
    line(console, words.verdict(report), "bold")
    for said in trust.headlines(report):
        line(console, said)


def _breakdown(console: Console, report: ReportData) -> None:
    from rich.text import Text

    rows = words.bucket_rows(report)
    if not rows:
        return
    heading(console, f"Where {words.span_phrase(report)} goes")
    largest, narrow = max(row.share for row in rows), console.width < _NARROW
    room = min(_BAR_CELLS, console.width - max(len(row.label) for row in rows) - _FIGURES)
    room = 0 if narrow or room < _LEAST_BAR else room
    table = new_table((("", "wrapped" if narrow else "left"), ("time", "right"), ("share", "right"), ("", "left")))
    for row in rows:
        bar = "█" * round(room * row.share / largest)
        style = "magenta" if row.idle else _STYLES.get(row.bucket, "green")
        table.add_row(*cells(row.label, format_ns(row.ns), format_share(row.share, 1)), Text(bar, style=style))
    table.add_row(*cells(f"sum: the {words.span_word(report)}", format_ns(words.step_ns(report)), format_share(1, 1)), style="bold")
    print_table(console, table)
    if note := words.idle_note(report):
        line(console, note, QUIET)


def _waiting(console: Console, report: ReportData) -> None:
    """Print where the device was idle and why, the calls that wait for it, how far the host is ahead, and the longest path."""
    found = waiting.causes(report)
    if found:
        _causes(console, report, found)
    _calls(console, report)
    lines = [text for text in (waiting.queue_line(report), waiting.path_line(report)) if text]
    if lines:
        console.print()
    for text in lines:
        line(console, text)


def _causes(console: Console, report: ReportData, found: list[waiting.Cause]) -> None:
    """Print each cause with its places below it, then what the names mean."""
    from rich.padding import Padding
    from rich.text import Text

    heading(console, f"Why the {words.device_word(report)} was idle")
    table = new_table((("cause, and where", "wrapped"), ("time", "right"), ("share", "right")))
    for cause in found:
        table.add_row(*cells(clean(cause.label), format_ns(cause.ns), format_share(cause.share, 1)))
        for place in cause.places:
            where = Padding(Text(clean(place.detail, 400), style=QUIET), (0, 0, 0, 2))
            figures = ("", "") if _all_of_it(cause) else (format_ns(place.ns), format_share(place.share, 1))
            table.add_row(where, *(Text(text, style=QUIET) for text in figures))
    print_table(console, table)
    if said := waiting.meanings(found):
        line(console, said, QUIET)


def _all_of_it(cause: waiting.Cause) -> bool:
    """Return whether a cause has one place alone, whose figures would be its own once more."""
    return len(cause.places) == 1 and format_ns(cause.places[0].ns) == format_ns(cause.ns)


def _calls(console: Console, report: ReportData) -> None:
    found = waiting.calls(report)
    if not found:
        return
    heading(console, f"Calls that wait for the {words.device_word(report)}, in {words.span_phrase(report)}")
    table = new_table((("call", "name"), ("calls", "right"), ("inside", "right"), ("idle after", "right")))
    for row in found:
        table.add_row(*cells(clean(waiting.call_name(row), 100), *waiting.call_figures(row, report)))
    print_with_details(console, table, [clean(waiting.site(row), 400) for row in found])


def _changes(console: Console, report: ReportData) -> None:
    """Print what the replay gives for each cost taken away, with the name by which a reader can try it."""
    found = waiting.changes(report)
    if not found:
        return
    heading(console, f"What changes could give at most (the {words.span_word(report)} replayed with one thing changed)")
    span, roomy = words.span_word(report), console.width >= _ROOMY
    settings = (("--set", "left"),) if roomy else ()
    table = new_table((("change", "wrapped"), *settings, (span, "right"), ("gain", "right")))
    for change in found:
        label = change.label if roomy or console.width < _NARROW else f"{change.label}, {change.setting}"
        table.add_row(*cells(clean(label, 160), *([clean(change.setting, 100)] if roomy else []), change.then, change.gain))
    print_table(console, table)
    line(console, "Others, and several at once: gpudiag whatif PATH --set NAME=VALUE", QUIET)


def _findings(console: Console, report: ReportData, everything: bool, script: str | None) -> None:
    """Print the first findings, the first of them with most detail, and the others in one line each; with `everything` all in full."""
    found, rest = chosen.findings(report)
    if everything:
        found, rest = (*found, *rest), ()
    if not found:
        heading(console, "Findings")
        line(console, words.nothing_found(report))
        return
    heading(console, "What matters most")
    for number, finding in enumerate(found, 1):
        if number > 1:
            console.print()
        _finding(console, number, finding, report, _IN_FULL if everything or number == 1 else _IN_BRIEF)
        _folded(console, finding, report, everything)
    if rest:
        console.print()
        line(console, f"And {len(rest)} more (in full: gpudiag report PATH --all-findings):")
    for number, finding in enumerate(rest, len(found) + 1):
        item(console, f"{number}. ", clean(chosen.in_short(finding), 200), indent=_INDENT)
    if said := chosen.on_gains(report):
        line(console, said, QUIET)
    if script is not None and (command := proving.command(report, clean(script, _LONGEST_COMMAND))):
        line(console, f"Measure it before you change the code: {command}")


def _folded(console: Console, finding: Finding, report: ReportData, everything: bool) -> None:
    """Print the symptoms of `finding`: their ids, or with `everything` what each says."""
    symptoms = chosen.folded(finding, report)
    if symptoms and not everything:
        line(console, f"Explains also: {clean(', '.join(rule for rule, _ in symptoms), 400)}.", QUIET, _INDENT)
    for rule, said in symptoms if everything else ():
        line(console, f"Explains also {clean(rule, 40)}: {said}", QUIET, _INDENT)


def _finding(console: Console, number: int, finding: Finding, report: ReportData, most: tuple[int, int]) -> None:
    """Print a finding with the first places and fixes: at most as many as `most` says."""
    from rich.text import Text

    severity = (finding.severity, _SEVERITIES.get(finding.severity, ""))
    item(
        console, f"{number}. ", Text.assemble((clean(finding.title, 100), "bold"), "  ", severity, (f"  {clean(finding.rule, 40)}", QUIET))
    )
    line(console, finding.message, indent=_INDENT)
    line(console, f"{words.ceiling_line(finding, report)} Confidence: {finding.confidence}.".strip(), "bold", _INDENT)
    for place in chosen.places(finding, report, most[0]):
        line(console, f"Where: {clean(words.where_text(place, report))}", indent=_INDENT)
    if not finding.fixes and finding.why:
        line(console, f"What to know: {clean(finding.why, _LONGEST_REASON)}", indent=_INDENT)
    for title_text, change, effect in words.fix_lines(finding)[: most[1]]:
        line(console, f"Try: {title_text}" + (f" ({effect})" if effect else ""), indent=_INDENT)
        if change:
            line(console, change, "cyan", _INDENT + 5)


def _trust(console: Console, report: ReportData) -> None:
    heading(console, "How far to trust this")
    table = new_table((("", "left"), ("", "wrapped")))
    for topic, said in (*trust.trust_lines(report), ("published", "; ".join(trust.reference_lines(report)))):
        if said:
            table.add_row(*cells(topic, unbroken(said)))
    print_table(console, table)
    for warning in trust.warning_lines(report):
        item(console, "! ", warning, "yellow")


def _recorded(console: Console, report: ReportData) -> None:
    found = recorded.lines(report)
    if not found:
        return
    heading(console, "Recorded with")
    table = new_table((("", "left"), ("", "wrapped")))
    for topic, said in found:
        table.add_row(*cells(topic, unbroken(clean(said, recorded.LONGEST))))
    print_table(console, table)
