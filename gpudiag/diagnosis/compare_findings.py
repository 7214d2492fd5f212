"""Findings that came, went and stayed between two runs, and the parts of the step side by side."""

from __future__ import annotations

from typing import Literal

from gpudiag.model.breakdown import BUCKETS
from gpudiag.model.compare import FindingChange, PartChange
from gpudiag.model.finding import Finding
from gpudiag.model.report import ReportData

_ORDER = ("came", "went", "stayed")


def finding_changes(a: ReportData, b: ReportData) -> tuple[FindingChange, ...]:
    """Return each rule that is a finding of one or both: what came first, then what went, then what stayed."""
    first, second = ({finding.rule: finding for finding in report.findings} for report in (a, b))
    made = [_change(rule, first.get(rule), second.get(rule), a, b) for rule in dict.fromkeys((*second, *first))]
    return tuple(sorted(made, key=lambda change: _ORDER.index(change.change)))


def fired(report: ReportData) -> set[str]:
    """Return the ids of the findings and of the symptoms that are told with them."""
    return {rule for finding in report.findings for rule in (finding.rule, *finding.folded)}


def _change(rule: str, first: Finding | None, second: Finding | None, a: ReportData, b: ReportData) -> FindingChange:
    in_a, in_b = rule in fired(a), rule in fired(b)
    change: Literal["came", "went", "stayed"] = "stayed" if in_a and in_b else "came" if in_b else "went"
    without = a if change == "came" else b
    shown = second or first
    return FindingChange(
        rule=rule,
        title=shown.title if shown else rule,
        change=change,
        a_severity=first.severity if first else None,
        b_severity=second.severity if second else None,
        a_ceiling_share=_ceiling(first),
        b_ceiling_share=_ceiling(second),
        reason="" if change == "stayed" else _why_not(rule, without),
    )


def _ceiling(finding: Finding | None) -> float | None:
    return finding.ceiling.share if finding is not None and finding.ceiling is not None else None


def _why_not(rule: str, report: ReportData) -> str:
    """Return why a rule is no finding of a run: '' where it passed."""
    outcome = next((one for one in report.rules if one.id == rule), None)
    if outcome is None:
        return "not judged: the report is of other rules"
    return "" if outcome.status == "passed" else f"{outcome.status.replace('_', ' ')}: {outcome.reason}"


def part_changes(a: ReportData, b: ReportData) -> tuple[PartChange, ...]:
    """Return the parts of the step breakdown that one of the two has; none where one has no complete step."""
    if not a.steps.count or not b.steps.count:
        return ()
    made = (
        PartChange(name, getattr(a.breakdown.buckets_ns, name) / a.steps.count, getattr(b.breakdown.buckets_ns, name) / b.steps.count)
        for name in BUCKETS
    )
    return tuple(part for part in made if part.a_ns or part.b_ns)
