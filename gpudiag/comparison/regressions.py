"""What got worse between two runs: findings that came and went, gates on findings, the gate on the step."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Literal, NamedTuple

from gpudiag.model.comparison import FindingChange, FindingGate, GateOutcome, GateResult, Measured, PartChange, StepComparison
from gpudiag.model.finding import SEVERITIES, Finding, RuleOutcome, Severity
from gpudiag.model.hardware import MOST_OTHERS
from gpudiag.model.notices import WITHOUT_GAIN, NoticeCode
from gpudiag.model.report import ReportData
from gpudiag.model.timeline import BUCKETS
from gpudiag.report.labels import list_fired_rules
from gpudiag.units import describe_ratio_change, format_ratio_change, format_share

_ORDER = ("came", "went", "stayed")


def compare_findings(a: ReportData, b: ReportData) -> tuple[FindingChange, ...]:
    """Return each rule that is a finding of one or both: what came first, then what went, then what stayed."""
    first, second = ({finding.rule: finding for finding in report.findings} for report in (a, b))
    fired_in_a, fired_in_b = list_fired_rules(a), list_fired_rules(b)
    found = []
    for rule in dict.fromkeys((*second, *first)):
        in_a, in_b = rule in fired_in_a, rule in fired_in_b
        change: Literal["came", "went", "stayed"] = "stayed" if in_a and in_b else "came" if in_b else "went"
        old, new, reason = first.get(rule), second.get(rule), ""
        if change == "stayed" and not (old and new):  # a symptom there
            folding = (finding.rule for finding in (a if new else b).findings if rule in finding.folded)
            reason = f"explained by {next(folding, 'another finding')}"
        elif change != "stayed":  # why it is no finding of the other run: '' where it passed
            outcome = next((one for one in (a if change == "came" else b).rules if one.id == rule), None)
            if outcome is None:
                reason = "not judged: the report is of other rules"
            elif outcome.status != "passed":
                reason = f"{outcome.status.replace('_', ' ')}: {outcome.reason}"
        shown = new or old
        found.append(
            FindingChange(
                rule=rule,
                title=shown.title if shown else rule,
                change=change,
                a_severity=old.severity if old else None,
                b_severity=new.severity if new else None,
                a_ceiling_share=old.ceiling.share if old and old.ceiling else None,
                b_ceiling_share=new.ceiling.share if new and new.ceiling else None,
                reason=reason,
            )
        )
    return tuple(sorted(found, key=lambda change: _ORDER.index(change.change)))


def compare_parts(a: ReportData, b: ReportData) -> tuple[PartChange, ...]:
    """Return the parts of the step breakdown that one of the two has; none where one has no complete step."""
    if not a.steps.count or not b.steps.count:
        return ()
    made = (
        PartChange(name, getattr(a.breakdown.buckets_ns, name) / a.steps.count, getattr(b.breakdown.buckets_ns, name) / b.steps.count)
        for name in BUCKETS
    )
    return tuple(part for part in made if part.a_ns or part.b_ns)


_MOST_TAKEN = 0.95


class Disturbance(NamedTuple):
    """What other programs may have done to the times of a recording and its baseline."""

    stretch: float = 1.0
    """The most by which a time can be longer for them: a program that has 1 - s of its cores takes 1 / (1 - s) of the time."""
    words: str = ""


UNDISTURBED = Disturbance()


def measure_disturbance(run: Measured, baseline: Measured | None = None) -> Disturbance:
    """Return how far other programs may explain a difference; 1 where none is known to. Ranks cannot be told from other programs."""
    shares = {}
    for name, side in (("run", run), ("baseline", baseline)):
        found = side.report.telemetry if side is not None and not side.report.ranks else None
        taken = (found.others_cpu_share if found is not None else None) or 0.0
        if taken >= MOST_OTHERS:
            shares[name] = min(taken, _MOST_TAKEN)
    if not shares:
        return UNDISTURBED
    told = " and ".join(f"{format_share(share)} of the cores in the {name}" for name, share in shares.items())
    return Disturbance(1 / (1 - max(shares.values())), f"other programs took {told}, record both on a quiet machine")


def decide_outcome(
    value: float, span: tuple[float, float] | None, limit: float, disturbed: Disturbance, *, upper: bool = True
) -> tuple[GateOutcome, str]:
    """Return whether a figure keeps its limit, by its interval and what other programs may explain; and why one beyond it is undecided."""
    beyond = operator.gt if upper else operator.lt
    if not beyond(value, limit):
        return "passed", ""
    nearest = value if span is None else span[0] if upper else span[1]
    if beyond(nearest, limit * disturbed.stretch if upper else limit / disturbed.stretch):
        return "failed", ""
    far = beyond(nearest, limit)
    return "within_noise", f"undecided: {disturbed.words}" if far else "its interval is not: undecided, more steps narrow it"


SLOWER_GATE = "fail-if-slower"


def judge_slower_gate(found: StepComparison, share: float, disturbed: Disturbance = UNDISTURBED) -> GateResult:
    """Return whether the median step of B is slower than that of A by more than `share`.

    It fails where the whole interval of the ratio lies beyond the limit: slower by more than that, and the variance within the runs does
    not explain it. Where the interval holds the limit the result is `within_noise`, which does not fail: record more steps to decide.
    Without an interval the ratio itself decides. A ratio that is not known fails: nothing was shown. What other programs may explain
    (`disturbed`) is undecided too.
    """
    ratio, limit = found.ratio, 1 + share
    if ratio is None:
        return GateResult(
            name=SLOWER_GATE, outcome="unknown", message="the step of one run is not known: no complete step was recorded", unit="ratio"
        )
    span = None if ratio.low is None or ratio.high is None else (ratio.low, ratio.high)
    outcome, doubt = decide_outcome(ratio.value, span, limit, disturbed)
    allowed, change = format_share(share, 1), describe_ratio_change(ratio.value)
    if span is None:
        decided = f"{'within' if outcome == 'passed' else 'beyond'} the {allowed} allowed"
        message = f"{change}, {decided}; decided by the medians alone, {ratio.reason}{f'; {doubt}' if doubt else ''}"
    else:
        message = f"{change} (interval {format_ratio_change(span[0])} to {format_ratio_change(span[1])})"
        if outcome == "passed":
            message += f", within the {allowed} allowed"
        elif outcome == "failed":
            message += f": the whole interval is beyond the {allowed} allowed, more than the steps of one run vary"
        else:
            message += f": beyond the {allowed} allowed, but {doubt}"
    return GateResult(
        name=SLOWER_GATE,
        outcome=outcome,
        message=message,
        unit="ratio",
        value=ratio.value,
        low=ratio.low,
        high=ratio.high,
        limit=limit,
    )


def judge_finding_gate(gate: FindingGate, report: ReportData, baseline: ReportData | None, doubt: str = "") -> Iterator[GateResult]:
    """Yield what was found of each kind of limit on findings; `doubt`: why new ones may be no change of the program."""
    counted = [finding for finding in report.findings if finding.rule not in gate.allow]
    if gate.fail_at is not None:
        yield _judge_severity(gate, "fail_at", gate.fail_at, counted, {})
    if gate.new_at is not None and baseline is None:
        yield _build_finding_result(gate, "findings new_at", "unknown", "not known: no baseline was given: --baseline BUNDLE", None)
    elif gate.new_at is not None and baseline is not None:
        known, behind = list_fired_rules(baseline), _list_suppressed_rules(baseline)
        new = [finding for finding in counted if finding.rule not in known]
        doubts = {finding.rule: doubt for finding in new} if doubt else behind
        yield _judge_severity(gate, "new_at", gate.new_at, new, doubts)
    outcomes, fired = {outcome.id: outcome for outcome in report.rules}, list_fired_rules(report)
    for rule in gate.forbid:
        yield _judge_forbidden(gate, rule, outcomes.get(rule), fired=rule in fired)


def _judge_severity(gate: FindingGate, key: str, least: Severity, findings: list[Finding], doubts: dict[str, str]) -> GateResult:
    """Return whether one of the findings is as severe; `doubts`: by rule, why it may be no change. All in doubt are undecided."""
    found = [finding for finding in findings if SEVERITIES.index(finding.severity) >= SEVERITIES.index(least)]
    if not found:
        said = f"no {'new ' if key == 'new_at' else ''}findings of severity {least} or above"
        return _build_finding_result(gate, f"findings {key}", "passed", said, 0.0)
    said = "; ".join(f"{finding.rule} ({finding.severity}): {finding.message or finding.title}" for finding in found)
    if all(finding.rule in doubts for finding in found):
        why = "; ".join(dict.fromkeys(doubts[finding.rule] for finding in found))
        return _build_finding_result(gate, f"findings {key}", "within_noise", f"{said} Undecided: {why}", float(len(found)))
    return _build_finding_result(gate, f"findings {key}", "failed", said, float(len(found)))


def _judge_forbidden(gate: FindingGate, rule: str, outcome: RuleOutcome | None, *, fired: bool) -> GateResult:
    name = f"findings forbid {rule}"
    if fired:
        message = outcome.reason if outcome and outcome.reason else f"{rule} is among the findings"
        return _build_finding_result(gate, name, "failed", message, 1.0)
    if outcome is None:
        return _build_finding_result(gate, name, "unknown", f"not known: {rule} was not judged in this report", None)
    if outcome.status == "passed" or (outcome.notice is not None and outcome.notice.code in WITHOUT_GAIN):
        return _build_finding_result(gate, name, "passed", f"{rule} {outcome.reason or 'passed'}", 0.0)
    message = f"not known: {rule} {outcome.status.replace('_', ' ')}: {outcome.reason}"
    return _build_finding_result(gate, name, "unknown", message, None)


def _list_suppressed_rules(report: ReportData) -> dict[str, str]:
    """Return the rules that another finding stood for, with which: of two runs of one program each may tell the same time by another."""
    return {
        one.id: f"in the baseline {one.notice.params['rule']} stands for {one.id}"
        for one in report.rules
        if one.notice is not None and one.notice.code == NoticeCode.SUPPRESSED_BY_RULE
    }


def _build_finding_result(gate: FindingGate, name: str, outcome: GateOutcome, message: str, count: float | None) -> GateResult:
    return GateResult(
        name=name,
        outcome=outcome,
        message=message,
        unit="findings",
        value=count,
        limit=0.0,
        required=gate.required,
        strict=gate.strict,
        line=gate.line,
    )
