"""Which findings a report tells in full, and how it names the others."""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag.model.finding import Finding, Where
from gpudiag.model.judged import NO_GAIN
from gpudiag.model.report import ReportData
from gpudiag.report import words

WORTH_TELLING = 0.01
"""Share of the step below which a gain, or the time of a place, is nothing that anybody acts upon."""

NO_SUM = "These gains do not add up: each is what one change gives by itself, and two may save the same time."
ORDER = "Those of severity info stand last, also where they could give more: gpudiag rules show ID says when a rule is info."


def findings(report: ReportData) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Return the findings that are told in full, and those that are only named: beyond the third, of severity info, less than 1 % to gain.

    One is told in full even where all are of severity info.
    """
    found = words.told(report)
    full = [finding for finding in found if finding.severity != "info" and _worth_telling(finding)][: words.MATTER_MOST]
    full = full or list(found[:1])
    return tuple(full), tuple(finding for finding in found if finding not in full)


def _worth_telling(finding: Finding) -> bool:
    return finding.ceiling is None or finding.ceiling.share >= WORTH_TELLING


def folded(finding: Finding, report: ReportData) -> tuple[tuple[str, str], ...]:
    """Return (rule, what it says) of each symptom that was folded into `finding`."""
    said = {outcome.id: outcome.reason for outcome in report.rules}
    return tuple((rule, said.get(rule, "")) for rule in finding.folded)


def on_gains(report: ReportData) -> str:
    """Return that gains do not add up, and why a larger one stands behind a smaller; '' where fewer than two findings have one."""
    gains = [finding for finding in words.told(report) if finding.ceiling is not None and finding.ceiling.share >= NO_GAIN]
    if len(gains) < 2:
        return ""
    return f"{NO_SUM} {ORDER}" if _larger_behind(gains) else NO_SUM


def _larger_behind(found: Sequence[Finding]) -> bool:
    """Return whether a finding of severity info could give more than one before it."""
    shares = [(finding.severity, finding.ceiling.share) for finding in found if finding.ceiling is not None]
    least = min((share for severity, share in shares if severity != "info"), default=1.0)
    return any(severity == "info" and share > least for severity, share in shares)


def places(finding: Finding, report: ReportData, most: int) -> tuple[Where, ...]:
    """Return the first places of a finding, without those below 1 % of the step; the first always."""
    least = WORTH_TELLING * report.breakdown.wall_ns
    first, rest = finding.where[:1], finding.where[1:most]
    return (*first, *(place for place in rest if place.time_ns is None or place.time_ns >= least))


def in_short(finding: Finding) -> str:
    """Return a finding as title, rule, severity and gain: 'Copies that only change the layout (MEM-07, info, up to 2 %)'."""
    if finding.ceiling is None:
        gain = "" if finding.bound == "method" else ", gain not known"
    elif finding.ceiling.method == "replay" and finding.ceiling.share < NO_GAIN:
        gain = ", no gain by itself"
    else:
        gain = f", up to {words.small_share(finding.ceiling.share)}"
    return f"{finding.title} ({finding.rule}, {finding.severity}{gain})"
