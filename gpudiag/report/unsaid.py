"""The rules that hold or might hold, and are no finding all the same: those that would gain nothing, and those that are withheld."""

from __future__ import annotations

from gpudiag.model.finding import RuleOutcome
from gpudiag.model.judged import AT_RECORDED_PACE, HOLDS, WITHHELD
from gpudiag.model.report import ReportData


def lines(report: ReportData) -> list[str]:
    """Return which rules are no finding though they hold or might, one line for those without a gain and one for those withheld."""
    idle, held = _without_gain(report), _withheld(report)
    where = f" {AT_RECORDED_PACE}" if any(AT_RECORDED_PACE in rule.reason for rule in idle) else ""
    found = [f"Hold, but would gain nothing{where}: {_ids(idle)}."] if idle else []
    return [*found, f"Withheld (why: --all-findings): {_ids(held)}."] if held else found


def reasons(report: ReportData) -> list[str]:
    """Return the reason of each rule that `lines` names; rules that are withheld for the same one in one line."""
    groups: dict[str, list[RuleOutcome]] = {}
    for rule in _withheld(report):
        groups.setdefault(rule.reason.removeprefix(WITHHELD), []).append(rule)
    alone = [f"{rule.id} {rule.reason}" for rule in _without_gain(report)]
    return [*alone, *(f"Withheld: {_ids(rules)}: {reason}" for reason, rules in groups.items())]


def _without_gain(report: ReportData) -> list[RuleOutcome]:
    return [rule for rule in report.rules if rule.status == "suppressed" and rule.reason.startswith(HOLDS)]


def _withheld(report: ReportData) -> list[RuleOutcome]:
    others = [rule for rule in report.rules if rule.status == "suppressed" and not rule.reason.startswith(HOLDS)]
    weak = [rule for rule in report.rules if rule.status == "not_applicable" and rule.reason.startswith(WITHHELD)]
    return sorted([*others, *weak], key=lambda rule: rule.id)


def _ids(rules: list[RuleOutcome]) -> str:
    return ", ".join(rule.id for rule in rules)
