"""What got worse between two runs: findings that came and went, gates on findings, the gate on the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from gpudiag.model.comparison import FindingChange, FindingGate, GateOutcome, GateResult, PartChange, StepComparison, StepRatio
from gpudiag.model.finding import Finding, RuleOutcome, Severity
from gpudiag.model.notices import WITHOUT_GAIN
from gpudiag.model.report import ReportData
from gpudiag.model.timeline import BUCKETS
from gpudiag.units import format_share

_ORDER = ("came", "went", "stayed")


def compare_findings(a: ReportData, b: ReportData) -> tuple[FindingChange, ...]:
    """Return each rule that is a finding of one or both: what came first, then what went, then what stayed."""
    first, second = ({finding.rule: finding for finding in report.findings} for report in (a, b))
    made = [_build_finding_change(rule, first.get(rule), second.get(rule), a, b) for rule in dict.fromkeys((*second, *first))]
    return tuple(sorted(made, key=lambda change: _ORDER.index(change.change)))


def list_fired_rules(report: ReportData) -> set[str]:
    """Return the ids of the findings and of the symptoms that are told with them."""
    return {rule for finding in report.findings for rule in (finding.rule, *finding.folded)}


def _build_finding_change(rule: str, first: Finding | None, second: Finding | None, a: ReportData, b: ReportData) -> FindingChange:
    in_a, in_b = rule in list_fired_rules(a), rule in list_fired_rules(b)
    change: Literal["came", "went", "stayed"] = "stayed" if in_a and in_b else "came" if in_b else "went"
    without = a if change == "came" else b
    shown = second or first
    return FindingChange(
        rule=rule,
        title=shown.title if shown else rule,
        change=change,
        a_severity=first.severity if first else None,
        b_severity=second.severity if second else None,
        a_ceiling_share=_ceiling_share(first),
        b_ceiling_share=_ceiling_share(second),
        reason="" if change == "stayed" else _explain_absence(rule, without),
    )


def _ceiling_share(finding: Finding | None) -> float | None:
    return finding.ceiling.share if finding is not None and finding.ceiling is not None else None


def _explain_absence(rule: str, report: ReportData) -> str:
    """Return why a rule is no finding of a run: '' where it passed."""
    outcome = next((one for one in report.rules if one.id == rule), None)
    if outcome is None:
        return "not judged: the report is of other rules"
    return "" if outcome.status == "passed" else f"{outcome.status.replace('_', ' ')}: {outcome.reason}"


def compare_parts(a: ReportData, b: ReportData) -> tuple[PartChange, ...]:
    """Return the parts of the step breakdown that one of the two has; none where one has no complete step."""
    if not a.steps.count or not b.steps.count:
        return ()
    made = (
        PartChange(name, getattr(a.breakdown.buckets_ns, name) / a.steps.count, getattr(b.breakdown.buckets_ns, name) / b.steps.count)
        for name in BUCKETS
    )
    return tuple(part for part in made if part.a_ns or part.b_ns)


SLOWER_GATE = "fail-if-slower"


def judge_slower_gate(found: StepComparison, share: float) -> GateResult:
    """Return whether the median step of B is slower than that of A by more than `share`.

    It fails where the whole interval of the ratio lies beyond the limit: slower by more than that, and the variance within the runs does
    not explain it. Where the interval holds the limit the result is `within_noise`, which does not fail: record more steps to decide.
    Without an interval the ratio itself decides. A ratio that is not known fails: nothing was shown.
    """
    ratio, limit = found.ratio, 1 + share
    if ratio is None:
        return GateResult(
            name=SLOWER_GATE, outcome="unknown", message="the step of one run is not known: no complete step was recorded", unit="ratio"
        )
    beyond = ratio.value > limit
    certain = ratio.low is None or ratio.low > limit
    return GateResult(
        name=SLOWER_GATE,
        outcome="passed" if not beyond else "failed" if certain else "within_noise",
        message=_format_slower_message(ratio, share, beyond=beyond, certain=certain),
        unit="ratio",
        value=ratio.value,
        low=ratio.low,
        high=ratio.high,
        limit=limit,
    )


def _format_slower_message(ratio: StepRatio, share: float, *, beyond: bool, certain: bool) -> str:
    allowed = format_share(share, 1)
    if ratio.low is None or ratio.high is None:
        decided = f"beyond the {allowed} allowed" if beyond else f"within the {allowed} allowed"
        return f"{describe_ratio_change(ratio.value)}, {decided}; decided by the medians alone, {ratio.reason}"
    span = f"{describe_ratio_change(ratio.value)} (interval {format_ratio_change(ratio.low)} to {format_ratio_change(ratio.high)})"
    if not beyond:
        return f"{span}, within the {allowed} allowed"
    if certain:
        return f"{span}: the whole interval is beyond the {allowed} allowed, so the variance within the runs does not explain it"
    return f"{span}: beyond the {allowed} allowed, but no further than the variance within the runs explains; record more steps to decide"


def format_ratio_change(ratio: float) -> str:
    """Return a ratio as a change of the step: '+3.2 %'."""
    return f"{(ratio - 1) * 100:+.1f} %"


def describe_ratio_change(ratio: float) -> str:
    """Return a ratio of steps in words: 'steps take 3.2 % longer'."""
    share = abs(ratio - 1)
    if share < 0.0005:
        return "steps take as long"
    return f"steps take {format_share(share, 1)} {'longer' if ratio > 1 else 'less time'}"


SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")


def judge_finding_gate(gate: FindingGate, report: ReportData, baseline: ReportData | None) -> Iterator[GateResult]:
    """Yield what was found of each kind of limit on findings."""
    counted = [finding for finding in report.findings if finding.rule not in gate.allow]
    if gate.fail_at is not None:
        found = _filter_severity(counted, gate.fail_at)
        yield _build_list_result(gate, "findings fail_at", found, f"{_describe_severity(gate.fail_at)} or above")
    if gate.new_at is not None:
        yield _judge_new(gate, gate.new_at, counted, baseline)
    outcomes = {outcome.id: outcome for outcome in report.rules}
    for rule in gate.forbid:
        yield _judge_forbidden(gate, rule, rule in list_fired_rules(report), outcomes.get(rule))


def _filter_severity(findings: Sequence[Finding], least: Severity) -> list[Finding]:
    return [finding for finding in findings if SEVERITIES.index(finding.severity) >= SEVERITIES.index(least)]


def _describe_severity(severity: Severity) -> str:
    return f"findings of severity {severity}"


def _build_list_result(gate: FindingGate, name: str, found: Sequence[Finding], what: str) -> GateResult:
    said = "; ".join(f"{finding.rule} ({finding.severity}): {finding.message or finding.title}" for finding in found)
    return _build_finding_result(gate, name, "failed" if found else "passed", said or f"no {what}", float(len(found)))


def _judge_new(gate: FindingGate, least: Severity, counted: Sequence[Finding], baseline: ReportData | None) -> GateResult:
    if baseline is None:
        return _build_finding_result(gate, "findings new_at", "unknown", "not known: no baseline was given: --baseline BUNDLE", None)
    known = list_fired_rules(baseline)
    found = [finding for finding in _filter_severity(counted, least) if finding.rule not in known]
    return _build_list_result(gate, "findings new_at", found, f"new {_describe_severity(least)} or above")


def _judge_forbidden(gate: FindingGate, rule: str, has_fired: bool, outcome: RuleOutcome | None) -> GateResult:
    name = f"findings forbid {rule}"
    if has_fired:
        return _build_finding_result(
            gate, name, "failed", outcome.reason if outcome and outcome.reason else f"{rule} is among the findings", 1.0
        )
    if outcome is None:
        return _build_finding_result(gate, name, "unknown", f"not known: {rule} was not judged in this report", None)
    if outcome.status == "passed" or (outcome.notice is not None and outcome.notice.code in WITHOUT_GAIN):
        return _build_finding_result(gate, name, "passed", f"{rule} {outcome.reason or 'passed'}", 0.0)
    return _build_finding_result(gate, name, "unknown", f"not known: {rule} {outcome.status.replace('_', ' ')}: {outcome.reason}", None)


def _build_finding_result(gate: FindingGate, name: str, outcome: GateOutcome, message: str, count: float | None) -> GateResult:
    return GateResult(
        name=name, outcome=outcome, message=message, unit="findings", value=count, limit=0.0, required=gate.required, line=gate.line
    )
