"""What the HTML page says of each finding: what, evidence, where, the most to gain, how to fix it, how to test that."""

from __future__ import annotations

import shlex
from typing import Any

from gpudiag.facts.values import CATALOGUE
from gpudiag.model.finding import Evidence, Finding, Where
from gpudiag.model.fixes import FIX_BY_ID
from gpudiag.model.report import ReportData
from gpudiag.report import chosen, words
from gpudiag.report.escape import clean, prose

MOST_PLACES = 3
"""Places of one finding."""

PROGRAM = "train.py ARGS"
"""Stands for the user's program: a report is passed on, and what follows a script on its command line may be secret."""

_LONGEST_PATH = 400


def cards(report: ReportData) -> list[dict[str, Any]]:
    """Return the findings in order, those that are told in full first."""
    full, rest = chosen.findings(report)
    ops = {clean(row.name, 160) for row in report.ops}
    return [_card(finding, report, ops) for finding in (*full, *rest)]


def in_full(report: ReportData) -> int:
    """Return how many findings are told in full."""
    return len(chosen.findings(report)[0])


def _card(finding: Finding, report: ReportData, ops: set[str]) -> dict[str, Any]:
    share = finding.ceiling.share if finding.ceiling else None
    return {
        "rule": clean(finding.rule, 60),
        "title": clean(finding.title),
        "severity": finding.severity,
        "confidence": finding.confidence,
        "message": prose(finding.message),
        "why": prose(finding.why, 4_000),
        "gain": prose(words.ceiling_line(finding, report)),
        "gain_percent": None if share is None else f"{min(1.0, max(0.0, share)) * 100:.2f}",
        "evidence": [_evidence(item) for item in finding.evidence],
        "fixes": _fixes(finding, report),
        "where": [_place(place, report, ops) for place in chosen.places(finding, report, MOST_PLACES)],
        "folded": [(clean(rule, 60), prose(said)) for rule, said in chosen.folded(finding, report)],
        "references": [reference(text) for text in finding.references],
    }


def _evidence(item: Evidence) -> tuple[str, str, str]:
    """Return (fact, value with its unit, what the fact is)."""
    known = CATALOGUE.get(item.fact)
    return clean(item.fact), clean(words.evidence_text(item)), prose(known.doc) if known else ""


def _place(place: Where, report: ReportData, ops: set[str]) -> tuple[str, str]:
    """Return a place in words, and the op of the table that it names: '' where it names none."""
    name = clean(place.what.partition(" [")[0].removesuffix(" on").split(", ")[0], 160)
    return clean(words.where_text(place, report)), name if name in ops else ""


def _fixes(finding: Finding, report: ReportData) -> list[dict[str, str]]:
    """Return the fixes: title, code change, effect on results, and the command that tests it."""
    rows = zip(finding.fixes, words.fix_lines(finding), strict=True)
    return [
        {"title": clean(title), "change": clean(change, 1_000), "effect": effect, "test": test_command(fix, report), "note": _note(fix)}
        for fix, (title, change, effect) in rows
    ]


def test_command(fix: str, report: ReportData) -> str:
    """Return the command line that measures a fix against the program as it is, '' for an id that is not known.

    A bundle keeps the result, and its report sets what was promised beside what is measured.
    """
    known = FIX_BY_ID.get(fix)
    if known is None:
        return ""
    path = clean(report.source.path, _LONGEST_PATH)
    kept = f" --from {shlex.quote(path)} -o {shlex.quote(path)}" if report.source.kind == "bundle" else ""
    change = f"--fix {fix}{'=VALUE' if known.needs_value else ''}" if known.injected else f"--variant {fix}=script:COPY.py"
    return f"gpudiag ab {change}{kept} {PROGRAM}"


def _note(fix: str) -> str:
    """Return what stands in the command of a fix that the reader has to fill in, '' where nothing does."""
    known = FIX_BY_ID.get(fix)
    if known is None:
        return ""
    if not known.injected:
        return "COPY.py: a copy of your script with the change in it; no experiment can make this change by itself."
    return f"VALUE: {known.values}." if known.needs_value else ""


def reference(text: str) -> tuple[str, str]:
    """Return (text, link); only https is linked, and only when a reader clicks it."""
    text = clean(text, 500)
    return text, text if text.startswith("https://") and " " not in text else ""
