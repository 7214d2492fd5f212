"""Which findings a report tells in full, the command that tests their fixes, and the fixes as text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gpudiag.fixes import FIX_BY_ID
from gpudiag.fixes.fix import Fix as KnownFix
from gpudiag.model.experiment import ParityKind
from gpudiag.model.finding import NO_GAIN, Finding, Where
from gpudiag.model.report import ReportData
from gpudiag.report import labels
from gpudiag.report.blocks import (
    Amount,
    Block,
    Column,
    Document,
    Excerpt,
    FindingCard,
    Fix,
    Fold,
    Link,
    Listing,
    Paragraph,
    Section,
    Table,
    Topics,
    build_row,
    say,
    say_all,
)
from gpudiag.report.console import clean

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
    told += [NAMED_WORK_ALONE] if labels.is_on_cpu(report) and any(severity != "info" for severity, _ in shares) else []
    return " ".join(told)


def select_places(finding: Finding, report: ReportData, most: int) -> tuple[Where, ...]:
    """Return the first places of a finding, without those below 1 % of the step; the first always."""
    least = WORTH_TELLING * report.breakdown.wall_ns
    first, rest = finding.where[:1], finding.where[1:most]
    return (*first, *(place for place in rest if place.time_ns is None or place.time_ns >= least))


def format_finding_brief(finding: Finding) -> str:
    """Return a finding as title, rule, severity and gain: 'Copies that only change the layout (MEM-07, info, up to 2 %)'."""
    figure = labels.format_bound_figure(finding)
    gain = f", {'potential speed-up ' if finding.ceiling is None else ''}{figure}" if figure else ""
    return f"{finding.title} ({finding.rule}, {finding.severity}{gain})"


SCRIPT_PLACEHOLDER = "train.py ARGS"
"""Stands for the script and its arguments where they are not known, or what follows the script may be secret: a report is passed on."""


def build_ab_command(report: ReportData, script: str = "") -> str:
    """Return the `gpudiag ab` with the first fix of each finding that is told; '' where an experiment can try none of them.

    A first finding that is a line of the program and has no fix is tried by a changed copy of the script. `script`: the program and its
    arguments as words of a shell; '' where they are not known.
    """
    full, _ = split_findings(report)
    # A running program takes a fix by its name alone
    injected = [
        [fix.id for name in finding.fixes if (fix := FIX_BY_ID.get(name)) and fix.injected and not fix.needs_value] for finding in full
    ]
    words, note = [f"--fix {fix}" for fix in dict.fromkeys(fixes[0] for fixes in injected if fixes)], ""
    if full and not injected[0] and any(place.file for place in full[0].where):
        words.insert(0, "--variant changed=script:CHANGED.py")
        note = "  # CHANGED.py: a copy with the change of finding 1"
    return f"{' '.join(['gpudiag ab', *words, script or SCRIPT_PLACEHOLDER])}{note}" if words else ""


_LONGEST_PATH, _LONGEST_SCRIPT = 400, 8_000


def build_findings_section(report: ReportData, amount: Amount, script: str | None = None) -> Section:
    """Return the findings: those that matter in full, the rest by name, on pages folded.

    `script`: the recorded program and its arguments, for the command that tries the fixes; None: no command is named.
    """
    full, rest = split_findings(report)
    if not full:
        return Section("Findings", (Paragraph(labels.format_nothing_found(report)),), "findings", nav="Findings")
    told = (*full, *rest) if amount.everything or amount.document else full
    cards = [build_finding_card(number, finding, report, amount, script or "") for number, finding in enumerate(told, 1)]
    shown: list[Block | None] = [*cards[: len(full)]]
    if rest and amount.everything:
        shown += cards[len(full) :]
    elif rest and amount.document:
        shown.append(Fold(f"And {len(rest)} more", tuple(cards[len(full) :]), printed=True))
    elif rest:
        brief = tuple(f"   {number}. {format_finding_brief(finding)}" for number, finding in enumerate(rest, len(full) + 1))
        shown += [Fold(f"And {len(rest)} more", (Listing(brief),), note="in full: gpudiag report PATH --all-findings")]
    shown.append(say(explain_gains(report), "quiet"))
    if amount.page and not script and any(finding.fixes for finding in (*full, *rest)):
        shown.append(Paragraph(f"In the commands, {SCRIPT_PLACEHOLDER} stands for your own program, as you start it.", "quiet"))
    if script is not None and not amount.page and (command := build_ab_command(report, clean(script, _LONGEST_SCRIPT))):
        named = "" if script else f" ({SCRIPT_PLACEHOLDER}: your own program, as you start it)"
        shown.append(Paragraph(f"Measure it before you change the code: {command}{named}"))
    return Section("Findings", tuple(block for block in shown if block is not None), "findings", nav="Findings")


def build_finding_card(
    number: int, finding: Finding, report: ReportData, amount: Amount, script: str = "", *, kept: bool = True
) -> FindingCard:
    """Return a finding as far as a format tells it; in a terminal of those behind the first one place and one fix: what to do first must
    not scroll away. `script`, `kept`: as of explain_test."""
    terminal = not amount.document
    brief = terminal and number > 1 and not amount.everything
    ops = {clean(row.name, 160) for row in report.ops}
    places: list[tuple[str, Link | None]] = []
    told_places = select_places(finding, report, 1 if brief else min(amount.places, 2) if terminal else 3)
    for place in told_places:
        name = clean(place.what.partition(" [")[0].removesuffix(" on").split(", ")[0], 160)  # the op of the table that it names
        places.append((labels.format_place(place, report), ("op", name) if name in ops else None))
    fixes = []
    for name, (title, change, effect) in zip(finding.fixes, labels.list_fix_lines(finding), strict=True):
        test, note = explain_test(name, report, script, kept=kept) if amount.page else ("", "")
        fixes.append(Fix(name, title, effect, change, test, note))
    told = finding.evidence if amount.document else ()
    evidence = tuple((item.fact, labels.format_evidence(item), item.doc) for item in told)
    symptoms = list_symptoms(finding, report)
    return FindingCard(
        number=number,
        rule=finding.rule,
        title=finding.title,
        severity=finding.severity,
        confidence=f"{finding.confidence} ({', '.join(finding.doubts)})" if finding.doubts else finding.confidence,
        message=finding.message,
        gain=labels.format_upper_bound(finding, report),
        share=finding.ceiling.share if finding.ceiling else None,
        figure=labels.format_bound_figure(finding),
        places=tuple(places),
        code=tuple(build_excerpts(told_places, report)) if amount.page else (),
        fixes=tuple(fixes[: 1 if brief else min(amount.fixes, 3) if terminal else None]),
        why=finding.why if amount.page or not finding.fixes else "",
        symptoms=symptoms if amount.document or amount.everything else tuple((rule, "") for rule, _ in symptoms),
        evidence=evidence,
        references=finding.references if amount.page else (),
    )


def build_excerpts(places: Iterable[Where], report: ReportData) -> Iterator[Excerpt]:
    """Yield the lines of the program around each place; that a file is gone or has changed is said once."""
    known, said = {(code.file, code.line): code for code in report.code}, set[str]()
    for file, line in dict.fromkeys((place.file, place.line) for place in places):
        code = known.get((file or "", line or 0))
        if code is None or (not code.lines and code.file in said):
            continue
        note = ""
        if not code.lines:
            said.add(code.file)
            why = "has changed since the recording" if code.status == "changed" else "is not where the report was made"
            note = f"{code.file} {why}: its lines are not shown."
        elif code.status == "changed":
            note = "As recorded; the file has changed since."
        yield Excerpt(f"{code.file}:{code.line}", code.first, code.line, code.lines, note)


_SECRET_WORDS = {"token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "auth", "apikey"}


def hide_secrets(script: str) -> str:
    """Return a program and its arguments as words of a shell, with '...' for values of options that are called like a secret.

    A page is passed on. '' for what is cut within a quotation: it is too long to be shown.
    """
    try:
        given = shlex.split(script)
    except ValueError:
        return ""
    words: list[str] = []
    for word in given:
        option, value, _ = word.partition("=")
        if words and words[-1].startswith("-") and _is_secret(words[-1]) and not word.startswith("-"):
            words.append("...")
        else:
            words.append(f"{option}=..." if value and _is_secret(option) else word)
    return shlex.join(words)


def _is_secret(option: str) -> bool:
    words = re.split(r"[-_.+]+", option.lower())
    return words[-1] == "key" or not _SECRET_WORDS.isdisjoint(words)


def explain_test(identifier: str, report: ReportData, script: str = "", *, kept: bool = True) -> tuple[str, str]:
    """Return the command that tests a fix, and a note on what the reader has to fill in ('': nothing).

    `script`: the recorded program and its arguments as words of a shell; '' where they are not known. `kept`: whether the bundle holds a
    report.json, whose upper bounds are then shown beside the result.
    """
    fix = FIX_BY_ID.get(identifier)
    if fix is None:
        return "", ""
    path = shlex.quote(clean(report.source.path, _LONGEST_PATH))
    bundle = f"{f' --from {path}' if kept else ''} -o {path}" if report.source.kind == "bundle" else ""
    if fix.injected:
        change = f"--fix {identifier}{'=VALUE' if fix.needs_value else ''}"
        note = f"VALUE: {fix.values}." if fix.needs_value else ""
    else:
        change = f"--variant {identifier}=script:COPY.py"
        note = "COPY.py: a copy of your script with the change in it; no experiment can inject this change."
    return f"gpudiag ab {change}{bundle} {hide_secrets(clean(script, _LONGEST_SCRIPT)) or SCRIPT_PLACEHOLDER}", note


NOT_ON_GPU = "not verified on a GPU"
ONLY_VARIANT = "not injected into a running program: compare a changed copy, --variant NAME=script:COPY.py"
_PARITY_CLASSES: dict[ParityKind, tuple[str, str]] = {
    "exact": ("exact", "the same losses and gradients"),
    "rounding": ("rounding", "losses and gradients differ by rounding in float32"),
    "low_precision": ("low precision", "they differ by rounding to 16 bit (or TF32)"),
    "semantics": ("semantics", "the training changes: other batches, order or random numbers"),
}


class FixPage(msgspec.Struct, frozen=True):
    """One fix with what is known of how it is tried."""

    fix: KnownFix
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


def build_fix_list(pages: Sequence[FixPage]) -> Document:
    """Return the fixes as a table: id, title and values, class, where each was verified."""
    rows = []
    for page in pages:
        said = [f"{page.fix.id}=VALUE: {page.fix.values}"] if page.fix.values and page.applies else []
        said += [] if page.applies else [ONLY_VARIANT]
        standing = (_PARITY_CLASSES[page.fix.parity][0], format_verified_devices(page))
        rows.append(build_row(page.fix.id, page.fix.title, *standing, notes=tuple(say_all(said, "quiet"))))
    columns = (
        Column("--fix"),
        Column("what it does", "words"),
        Column("parity", least=92, below=""),
        Column("verified", least=92, below=""),
    )
    foot = [Paragraph(f"{parity}: {meaning}", "quiet") for parity, meaning in _PARITY_CLASSES.values()]
    foot.append(Paragraph(f"{len(pages)} fixes. Code change, conflicts and evidence of one: gpudiag fixes ID", "quiet"))
    table = Table(columns, tuple(rows), "Fixes")
    return Document("gpudiag fixes", "", leads=(table,), foot=tuple(foot))


def build_fix_page(page: FixPage) -> Document:
    """Return what there is to know of one fix."""
    fix = page.fix
    value = f", or --fix {fix.id}=VALUE: {fix.values}" if fix.values else ""
    topics = (
        ("change", fix.change),
        ("try it", f"gpudiag ab --fix {fix.id}{value}" if page.applies else ONLY_VARIANT),
        ("parity", ": ".join(_PARITY_CLASSES[fix.parity])),
        ("conflicts", ", ".join(fix.conflicts)),
        ("applied", page.applied),
        ("evidence", page.evidence),
        ("needs", "a GPU" if page.needs_gpu else ""),
        ("verified", format_verified_devices(page)),
    )
    return Document("gpudiag fixes", f"{fix.id}: {fix.title}", foot=(Topics(tuple((topic, said) for topic, said in topics if said)),))
