"""Gates on findings: by severity, by what the baseline did not have, by rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpudiag.diagnosis.compare_findings import fired
from gpudiag.model.finding import Finding, RuleOutcome, Severity
from gpudiag.model.gates import FindingGate, GateOutcome, GateResult
from gpudiag.model.judged import HOLDS
from gpudiag.model.report import ReportData

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")


def finding_results(gate: FindingGate, report: ReportData, baseline: ReportData | None) -> Iterator[GateResult]:
    """Yield what was found of each kind of limit on findings."""
    counted = [finding for finding in report.findings if finding.rule not in gate.allow]
    if gate.fail_at is not None:
        found = _at_least(counted, gate.fail_at)
        yield _told(gate, "findings fail_at", found, f"{_of(gate.fail_at)} or above")
    if gate.new_at is not None:
        yield _new(gate, gate.new_at, counted, baseline)
    outcomes = {outcome.id: outcome for outcome in report.rules}
    for rule in gate.forbid:
        yield _forbidden(gate, rule, rule in fired(report), outcomes.get(rule))


def _at_least(findings: Sequence[Finding], least: Severity) -> list[Finding]:
    return [finding for finding in findings if SEVERITIES.index(finding.severity) >= SEVERITIES.index(least)]


def _of(severity: Severity) -> str:
    return f"findings of severity {severity}"


def _told(gate: FindingGate, name: str, found: Sequence[Finding], what: str) -> GateResult:
    said = "; ".join(f"{finding.rule} ({finding.severity}): {finding.message or finding.title}" for finding in found)
    return _result(gate, name, "failed" if found else "passed", said or f"no {what}", float(len(found)))


def _new(gate: FindingGate, least: Severity, counted: Sequence[Finding], baseline: ReportData | None) -> GateResult:
    if baseline is None:
        return _result(gate, "findings new_at", "unknown", "not known: no baseline was given: --baseline BUNDLE", None)
    known = fired(baseline)
    found = [finding for finding in _at_least(counted, least) if finding.rule not in known]
    return _told(gate, "findings new_at", found, f"new {_of(least)} or above")


def _forbidden(gate: FindingGate, rule: str, has_fired: bool, outcome: RuleOutcome | None) -> GateResult:
    name = f"findings forbid {rule}"
    if has_fired:
        return _result(gate, name, "failed", outcome.reason if outcome and outcome.reason else f"{rule} is among the findings", 1.0)
    if outcome is None:
        return _result(gate, name, "unknown", f"not known: {rule} was not judged in this report", None)
    if outcome.status == "passed" or (outcome.status == "suppressed" and outcome.reason.startswith(HOLDS)):
        return _result(gate, name, "passed", f"{rule} {outcome.reason or 'passed'}", 0.0)
    return _result(gate, name, "unknown", f"not known: {rule} {outcome.status.replace('_', ' ')}: {outcome.reason}", None)


def _result(gate: FindingGate, name: str, outcome: GateOutcome, message: str, count: float | None) -> GateResult:
    return GateResult(
        name=name, outcome=outcome, message=message, unit="findings", value=count, limit=0.0, required=gate.required, line=gate.line
    )
