"""Judging: every rule yields exactly one outcome, those that fired become findings, symptoms are folded under their cause."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpudiag.diagnosis.confidence import GRADES, MEASUREMENT_RULE, Measurement, confidence_of
from gpudiag.diagnosis.rule import Rule
from gpudiag.diagnosis.slowdown import explained_by_profiler
from gpudiag.diagnosis.verdict import Verdict, decide
from gpudiag.diagnosis.withhold import withheld
from gpudiag.facts import CATALOGUE, Facts
from gpudiag.facts.registry import NO_ACCELERATOR
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Ceiling, Finding, Missing, RuleOutcome
from gpudiag.units import format_share

SEEN_ENOUGH = 0.5
"""Below this share of the kernel time with shapes, a rule that rests on the roofline can fire but not pass: the cause may lie in the
larger part, which was not seen (replayed graphs, kernels without ops)."""


NO_GAIN = 0.0005
"""Share of the steps below which a ceiling is none: in reports it reads 0.0 %."""


class Judgement(msgspec.Struct, frozen=True):
    """What the rules say of one analysis."""

    findings: tuple[Finding, ...]
    """Ordered: an invalid measurement first, then by ceiling, those that gain nothing after the unknown; then by confidence, then by id."""
    outcomes: tuple[RuleOutcome, ...]
    """One for each rule, by id."""
    fact_errors: dict[str, str] = {}
    """Facts that failed (bugs) -> exception."""


def judge(analysis: Analysis, rules: Iterable[Rule], facts: Facts | None = None) -> Judgement:
    """Return findings and outcomes of `rules` over `analysis`. Deterministic; a rule that fails costs only itself.

    `facts`: those of `analysis`, where they serve others too: a what-if is then replayed once.
    """
    ordered = tuple(sorted(rules, key=lambda rule: rule.id))
    facts = facts or Facts(analysis)
    verdicts = {rule.id: _verdict(rule, analysis, facts) for rule in ordered}
    verdicts.update(withheld(ordered, verdicts, facts.value))
    fired = [rule for rule in ordered if verdicts[rule.id].status == "fired"]
    measured = _measurement(verdicts.get(MEASUREMENT_RULE))
    findings = [_finding(rule, verdicts[rule.id], analysis, facts, measured) for rule in fired]
    outcomes = tuple(_outcome(rule, verdicts[rule.id]) for rule in ordered)
    folded = _fold(sorted(findings, key=_rank), {rule.id: rule.file.explains for rule in fired})
    return Judgement(tuple(folded), outcomes, dict(facts.errors))


def _measurement(verdict: Verdict | None) -> Measurement:
    if verdict is None or verdict.status != "fired":
        return "sound"
    return "invalid" if verdict.severity == "critical" else "weak"


def _verdict(rule: Rule, analysis: Analysis, facts: Facts) -> Verdict:
    if analysis.device_kind not in rule.file.device_kinds:
        return Verdict("not_applicable", NO_ACCELERATOR if analysis.device_kind == "cpu" else "only for runs without an accelerator")
    try:
        verdict = decide(rule, facts.value)
        if verdict.status == "passed":
            return _unseen(rule, facts) or verdict
        reason = explained_by_profiler(rule, analysis, facts.value) if verdict.status == "fired" else ""
        return Verdict("not_applicable", reason) if reason else verdict
    except Exception as error:  # noqa: BLE001 - one broken rule must not cost the others
        return Verdict("error", f"{type(error).__name__}: {error}")


def _unseen(rule: Rule, facts: Facts) -> Verdict | None:
    """Return not_applicable where too little of the kernel time has shapes for `rule` to pass, else None."""
    seen = facts.value("shaped_share")
    if rule.file.basis != "roofline" or isinstance(seen, (Missing, str)) or seen >= SEEN_ENOUGH:
        return None
    return Verdict("not_applicable", f"only {format_share(seen, 1)} of the kernel time belongs to ops with recorded shapes")


def _outcome(rule: Rule, verdict: Verdict) -> RuleOutcome:
    return RuleOutcome(rule.id, verdict.status, verdict.message if verdict.status == "fired" else verdict.reason)


def _finding(rule: Rule, verdict: Verdict, analysis: Analysis, facts: Facts, measured: Measurement) -> Finding:
    file = rule.file
    return Finding(
        rule=rule.id,
        title=file.title,
        severity=verdict.severity or "info",
        bound=file.bound,
        message=verdict.message,
        why=" ".join(file.why.split()),
        evidence=verdict.evidence,
        ceiling=_ceiling(rule, verdict, analysis, facts),
        confidence=confidence_of(rule, analysis.device, facts.value, measured),
        fixes=verdict.fixes,
        where=facts.places(file.where) if file.where is not None else (),
        references=file.references,
    )


def _ceiling(rule: Rule, verdict: Verdict, analysis: Analysis, facts: Facts) -> Ceiling | None:
    """Return the ceiling cut to the wall time of the analysed steps; replayed where every time that it is made of is."""
    if verdict.ceiling_ns is None or rule.file.ceiling is None or rule.ceiling is None or analysis.wall_ns <= 0:
        return None
    time_ns = min(round(verdict.ceiling_ns), analysis.wall_ns)
    times = [name for name in rule.ceiling.names if name in CATALOGUE and CATALOGUE[name].unit == "ns"]
    replayed = bool(times) and all(map(facts.replayed, times))
    error = analysis.replay.error_share if replayed and analysis.replay else None
    return Ceiling(time_ns, time_ns / analysis.wall_ns, "replay" if replayed else "formula", rule.file.ceiling.what_if, error)


def _rank(finding: Finding) -> tuple[bool, int, int, int, str]:
    invalid = finding.rule == MEASUREMENT_RULE and finding.severity == "critical"
    time = finding.ceiling.time_ns if finding.ceiling else 0
    known = 1 if finding.ceiling is None else 0 if finding.ceiling.share >= NO_GAIN else 2
    return (not invalid, known, -time, -GRADES.index(finding.confidence), finding.rule)


def _fold(findings: list[Finding], explains: dict[str, tuple[str, ...]]) -> list[Finding]:
    """Return the findings that no other explains, each with the ids (and the fixes) of those that it explains.

    A symptom goes to the first of its causes in the order of the findings; symptoms of symptoms go along.
    """
    present = {finding.rule: finding for finding in findings}
    symptoms = {symptom for rule in present for symptom in explains[rule] if symptom in present}
    taken: set[str] = set()
    folded = []
    for finding in findings:
        if finding.rule in symptoms:
            continue
        own = [rule for rule in _all_symptoms(finding.rule, explains, present) if rule not in taken]
        taken.update(own)
        fixes = dict.fromkeys([*finding.fixes, *(fix for rule in own for fix in present[rule].fixes)])
        folded.append(msgspec.structs.replace(finding, folded=tuple(own), fixes=tuple(fixes)))
    return folded


def _all_symptoms(cause: str, explains: dict[str, tuple[str, ...]], present: dict[str, Finding]) -> list[str]:
    """Return the present rules that `cause` explains, directly or through others, sorted. The loader rules circles out."""
    reached: set[str] = set()
    pending = [rule for rule in explains[cause] if rule in present]
    while pending:
        rule = pending.pop()
        if rule not in reached:
            reached.add(rule)
            pending.extend(symptom for symptom in explains[rule] if symptom in present)
    return sorted(reached - {cause})
