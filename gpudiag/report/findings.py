"""Which findings a report tells in full, the command that tests their fixes, and the fixes as text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpudiag.fixes import FIX_BY_ID
from gpudiag.fixes.fix import Fix, Parity
from gpudiag.model.finding import NO_GAIN, Finding, Where
from gpudiag.model.report import ReportData
from gpudiag.report import labels
from gpudiag.report.console import (
    QUIET,
    clean,
    clean_unbroken,
    collect_text,
    create_console,
    create_table,
    format_cells,
    print_line,
    print_table,
)

WORTH_TELLING = 0.01
"""Share of the step below which a gain, or the time of a place, is nothing that anybody acts upon."""

GAINS_DO_NOT_ADD_UP = "These upper bounds do not add up: each is for one change by itself, and two changes may save the same time."
NAMED_WORK_ALONE = "On a CPU a bound is the named work alone: what runs beside it then has the caches, and often gains as well."
"""Measured gains were up to 20 points above such a bound (samples/styles/SCORE.md)."""
INFO_STANDS_LAST = "Findings of severity info come last, even where their bound is larger: gpudiag rules show ID says when a rule is info."


def split_findings(report: ReportData) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Return the findings that are told in full, and those that are only named: beyond the third, of severity info, less than 1 % to gain.

    One is told in full even where all are of severity info.
    """
    found = labels.select_findings(report)
    full = [
        finding for finding in found if finding.severity != "info" and (finding.ceiling is None or finding.ceiling.share >= WORTH_TELLING)
    ][: labels.MATTER_MOST]
    full = full or list(found[:1])
    return tuple(full), tuple(finding for finding in found if finding not in full)


def list_symptoms(finding: Finding, report: ReportData) -> tuple[tuple[str, str], ...]:
    """Return (rule, what it says) of each symptom that was folded into `finding`."""
    said = {outcome.id: outcome.reason for outcome in report.rules}
    return tuple((rule, said.get(rule, "")) for rule in finding.folded)


def explain_gains(report: ReportData) -> str:
    """Return what bounds do not say: that gains do not add up, why a larger one stands behind a smaller, what a CPU gains besides."""
    gains = [finding for finding in labels.select_findings(report) if finding.ceiling is not None and finding.ceiling.share >= NO_GAIN]
    # Whether a finding of severity info could give more than one before it
    shares = [(finding.severity, finding.ceiling.share) for finding in gains if finding.ceiling is not None]
    least = min((share for severity, share in shares if severity != "info"), default=1.0)
    told = [GAINS_DO_NOT_ADD_UP] if len(gains) > 1 else []
    told += [INFO_STANDS_LAST] if len(gains) > 1 and any(severity == "info" and share > least for severity, share in shares) else []
    on_cpu = report.device is not None and report.device.kind == "cpu"
    told += [NAMED_WORK_ALONE] if on_cpu and any(severity != "info" for severity, _ in shares) else []
    return " ".join(told)


def select_places(finding: Finding, report: ReportData, most: int) -> tuple[Where, ...]:
    """Return the first places of a finding, without those below 1 % of the step; the first always."""
    least = WORTH_TELLING * report.breakdown.wall_ns
    first, rest = finding.where[:1], finding.where[1:most]
    return (*first, *(place for place in rest if place.time_ns is None or place.time_ns >= least))


def format_finding_brief(finding: Finding) -> str:
    """Return a finding as title, rule, severity and gain: 'Copies that only change the layout (MEM-07, info, up to 2 %)'."""
    if finding.ceiling is None:
        gain = "" if finding.bound == "method" else ", potential speed-up not known"
    elif finding.ceiling.method == "replay" and finding.ceiling.share < NO_GAIN:
        gain = ", no gain by itself"
    else:
        gain = f", up to {labels.format_small_share(finding.ceiling.share)}"
    return f"{finding.title} ({finding.rule}, {finding.severity}{gain})"


SCRIPT_PLACEHOLDER = "train.py ARGS"
"""Stands for the script and its arguments where they are not known."""


def build_ab_command(report: ReportData, script: str = "") -> str:
    """Return the `gpudiag ab` with the first fix of each finding that is told; '' where an experiment can try none of them.

    `script`: the program and its arguments as words of a shell; '' where they are not known.
    """
    fixes: list[str] = []
    for finding in split_findings(report)[0]:
        known = (fix for name in finding.fixes if (fix := FIX_BY_ID.get(name)) is not None)
        fixes += [fix.id for fix in known if fix.injected and not fix.needs_value][:1]  # a running program takes it by its name alone
    return " ".join(["gpudiag ab", *(f"--fix {fix}" for fix in dict.fromkeys(fixes)), script or SCRIPT_PLACEHOLDER]) if fixes else ""


NOT_ON_GPU = "not verified on a GPU"
ONLY_VARIANT = "not injected into a running program: compare a changed copy, --variant NAME=script:COPY.py"
_ROOMY = 92
"""Columns from which class and devices have columns of their own."""
_PARITY_CLASSES: dict[Parity, tuple[str, str]] = {
    "exact": ("exact", "the same losses and gradients"),
    "rounding": ("rounding", "losses and gradients differ by rounding in float32"),
    "low_precision": ("low precision", "they differ by rounding to 16 bit (or TF32)"),
    "semantics": ("semantics", "the training changes: other batches, order or random numbers"),
}


class FixPage(msgspec.Struct, frozen=True):
    """One fix with what is known of how it is tried."""

    fix: Fix
    applies: bool
    needs_gpu: bool = False
    applied: str = ""
    evidence: str = ""


def format_verified_devices(page: FixPage) -> str:
    """Return the kinds of devices on which an experiment has shown the fix to work; that no GPU has is always said."""
    kinds = [kind.upper() for kind in page.fix.verified if kind != "gpu"]
    if "gpu" in page.fix.verified:
        return ", ".join([*kinds, "GPU"])
    if page.needs_gpu or not page.applies:  # a CPU has nothing to show of it
        return NOT_ON_GPU
    return "; ".join([*kinds, NOT_ON_GPU])


def render_fix_list(pages: Sequence[FixPage], *, width: int = 100, color: bool = False) -> str:
    """Return the fixes as a table of at most `width` columns: id, title and values, class, where each was verified."""
    console, sink = create_console(width, color)
    roomy = console.width >= _ROOMY
    more = (("parity", "left"), ("verified", "left")) if roomy else ()
    table = create_table((("--fix", "left"), ("what it does", "wrapped"), *more))
    for page in pages:
        standing = (_PARITY_CLASSES[page.fix.parity][0], format_verified_devices(page))
        # The cell that says what a fix does: title, then in quieter lines what does not stand in columns
        from rich.text import Text

        details = [] if roomy else ["; ".join(standing)]
        if page.fix.values and page.applies:
            details.append(f"{page.fix.id}=VALUE: {page.fix.values}")
        if not page.applies:
            details.append(ONLY_VARIANT)
        told = Text(clean_unbroken(page.fix.title))
        for said in details:
            told.append(f"\n{clean_unbroken(said)}", style=QUIET)
        table.add_row(*format_cells(clean(page.fix.id, 60)), told, *format_cells(*(standing if roomy else ())))
    print_table(console, table)
    console.print()
    for parity, meaning in _PARITY_CLASSES.values():
        print_line(console, f"{parity}: {meaning}", QUIET)
    print_line(console, f"{len(pages)} fixes. Code change, conflicts and evidence of one: gpudiag fixes ID", QUIET)
    return collect_text(sink)


def render_fix(page: FixPage, *, width: int = 100, color: bool = False) -> str:
    """Return what there is to know of one fix, as text of at most `width` columns."""
    console, sink = create_console(width, color)
    print_line(console, f"{page.fix.id}: {page.fix.title}", "bold")
    console.print()
    table = create_table((("", "left"), ("", "wrapped")))
    fix = page.fix
    value = f", or --fix {fix.id}=VALUE: {fix.values}" if fix.values else ""
    for topic, said in [
        ("change", fix.change),
        ("try it", f"gpudiag ab --fix {fix.id}{value}" if page.applies else ONLY_VARIANT),
        ("parity", ": ".join(_PARITY_CLASSES[fix.parity])),
        ("conflicts", ", ".join(fix.conflicts)),
        ("applied", page.applied),
        ("evidence", page.evidence),
        ("needs", "a GPU" if page.needs_gpu else ""),
        ("verified", format_verified_devices(page)),
    ]:
        if said:
            table.add_row(*format_cells(topic, clean_unbroken(said)))
    print_table(console, table)
    return collect_text(sink)
