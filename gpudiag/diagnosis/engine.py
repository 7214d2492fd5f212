"""Judging: every rule yields exactly one outcome, those that fired become findings, symptoms are folded under their cause."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from gpudiag.diagnosis.confidence import GRADES, Measurement, confidence_of
from gpudiag.diagnosis.expression import Lookup
from gpudiag.diagnosis.rule import Rule
from gpudiag.diagnosis.slowdown import explained_by_profiler
from gpudiag.diagnosis.verdict import Verdict, decide
from gpudiag.diagnosis.withhold import NEVER, withheld
from gpudiag.facts.registry import NO_ACCELERATOR
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import Ceiling, FactValue, Finding, Missing, RuleOutcome, Severity
from gpudiag.model.judged import AT_RECORDED_PACE, HOLDS, MEASUREMENT_RULE, NO_GAIN, SWITCHED_OFF
from gpudiag.units import format_share

if TYPE_CHECKING:
    from gpudiag.facts import Facts

SEEN_ENOUGH = 0.5
"""Below this share of the kernel time with shapes, a rule that rests on the roofline can fire but not pass: the cause may lie in the
larger part, which was not seen (replayed graphs, kernels without ops)."""


SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")

NOT_ABOUT_TIME = (NEVER, "CAP-")
"""How the ids of rules begin that matter without a gain of time: hardware that fails, memory that runs out."""

FOLDED_UP_TO = 1.2
"""A symptom goes into its cause as long as it gives back no more than this times what the cause does: what one finding explains of another
cannot be much larger than the whole (heuristic: two ceilings differ by what they assume; a replay is off by a tenth at times)."""

LITTLE = 0.03
MUCH = 0.20
"""Shares of the step: with a ceiling below the first a finding is info at most, below the second warning at most (heuristic: 3 % is the
floor of most rules, and what a change of a run's seed or node moves the step by; a fifth of a run is worth stopping it for)."""


class Judgement(msgspec.Struct, frozen=True):
    """What the rules say of one analysis."""

    findings: tuple[Finding, ...]
    """Ordered: an invalid measurement (or its cause) first, then what is critical at any cost (failing hardware), warnings, infos, last
    that the measurement is weak; each by ceiling, the unknown after the known; then by confidence, then by id.

    Ceilings of two findings do not add up. What would gain nothing is none.
    """
    outcomes: tuple[RuleOutcome, ...]
    """One for each rule, by id."""
    fact_errors: dict[str, str] = {}
    """Facts that failed (bugs) -> exception."""


def judge(analysis: Analysis, rules: Iterable[Rule], facts: Facts | None = None) -> Judgement:
    """Return findings and outcomes of `rules` over `analysis`. Deterministic; a rule that fails costs only itself.

    `facts`: those of `analysis`, where they serve others too: a what-if is then replayed once.
    """
    ordered = tuple(sorted(rules, key=lambda rule: rule.id))
    if facts is None:
        from gpudiag.facts import Facts

        facts = Facts(analysis)
    verdicts = {rule.id: _verdict(rule, analysis, facts) for rule in ordered}
    verdicts.update(withheld(ordered, verdicts, lambda rule: _facts_of(rule, facts)))
    fired = [rule for rule in ordered if verdicts[rule.id].status == "fired"]
    measured = _measurement(verdicts.get(MEASUREMENT_RULE))
    all_findings = [_finding(rule, verdicts[rule.id], analysis, facts, measured) for rule in fired]
    pace = AT_RECORDED_PACE if analysis.profiler_slowdown is None else "as things are"
    verdicts.update({finding.rule: _without_gain(finding, pace) for finding in all_findings if _gains_nothing(finding)})
    findings = [finding for finding in all_findings if not _gains_nothing(finding)]
    outcomes = tuple(_outcome(rule, verdicts[rule.id]) for rule in ordered)
    explains = {finding.rule: rule.file.explains for finding in findings for rule in fired if rule.id == finding.rule}
    first = frozenset(rule for rule, symptoms in explains.items() if measured == "invalid" and MEASUREMENT_RULE in symptoms)
    folded = _fold(sorted(findings, key=lambda finding: _rank(finding, first)), explains)
    folded.sort(key=lambda finding: _rank(finding, first))
    return Judgement(tuple(_causes_first(folded, explains)), outcomes, dict(facts.errors))


def _facts_of(rule: Rule, facts: Facts) -> Lookup:
    """Return the lookup of `facts` with those that `rule` defines by a query."""
    own = rule.file.facts

    def lookup(name: str) -> FactValue | Missing:
        return facts.query(f"{rule.id}.{name}", own[name].sql, own[name].unit) if name in own else facts.value(name)

    return lookup


def _measurement(verdict: Verdict | None) -> Measurement:
    if verdict is None or verdict.status != "fired":
        return "sound"
    return "invalid" if verdict.severity == "critical" else "weak"


def _verdict(rule: Rule, analysis: Analysis, facts: Facts) -> Verdict:
    if analysis.device_kind not in rule.file.device_kinds:
        return Verdict("not_applicable", NO_ACCELERATOR if analysis.device_kind == "cpu" else "only for runs without an accelerator")
    if rule.disabled:
        return Verdict("not_applicable", f"{SWITCHED_OFF} in {rule.disabled}")
    try:
        lookup = _facts_of(rule, facts)
        verdict = decide(rule, lookup)
        if verdict.status == "passed":
            reason = explained_by_profiler(rule, verdict, lookup)
            return Verdict("not_applicable", reason) if reason else _unseen(rule, facts) or verdict
        return verdict
    except Exception as error:  # noqa: BLE001 - one broken rule must not cost the others
        return Verdict("error", f"{type(error).__name__}: {error}")


def _unseen(rule: Rule, facts: Facts) -> Verdict | None:
    """Return not_applicable where too little of the kernel time has shapes for `rule` to pass, else None."""
    seen = facts.value("shaped_share")
    if rule.file.basis != "roofline" or isinstance(seen, (Missing, str)) or seen >= SEEN_ENOUGH:
        return None
    return Verdict("not_applicable", f"only {format_share(seen, 1)} of the kernel time belongs to ops with recorded shapes")


def _outcome(rule: Rule, verdict: Verdict) -> RuleOutcome:
    said = verdict.message if verdict.status == "fired" else verdict.reason
    return RuleOutcome(rule.id, verdict.status, said, ", ".join(rule.changed))


def _finding(rule: Rule, verdict: Verdict, analysis: Analysis, facts: Facts, measured: Measurement) -> Finding:
    file = rule.file
    ceiling = _ceiling(rule, verdict, analysis, facts)
    return Finding(
        rule=rule.id,
        title=file.title,
        severity=_severity(rule.id, verdict.severity or "info", ceiling),
        bound=file.bound,
        message=verdict.message,
        why=" ".join(file.why.split()),
        evidence=verdict.evidence,
        ceiling=ceiling,
        confidence=confidence_of(rule, analysis.device, facts.value, measured),
        fixes=verdict.fixes,
        where=facts.places(file.where) if file.where is not None else (),
        references=file.references,
    )


def _gains_nothing(finding: Finding) -> bool:
    """Return whether the step would gain nothing worth telling, of a finding that is about time."""
    return finding.ceiling is not None and finding.ceiling.share < NO_GAIN and not finding.rule.startswith(NOT_ABOUT_TIME)


def _without_gain(finding: Finding, pace: str) -> Verdict:
    """Return the verdict of a rule that holds where, at this `pace`, something else limits the step, or which is about too little of it."""
    share = format_share(finding.ceiling.share, 1) if finding.ceiling else ""
    return Verdict("suppressed", f"{HOLDS}would save {share} of the step at most {pace}: {finding.message}")


def _severity(rule: str, own: Severity, ceiling: Ceiling | None) -> Severity:
    """Return the severity that the rule gives, lowered to what the share of the step deserves where that is known."""
    if ceiling is None or (ceiling.share < NO_GAIN and rule.startswith(NOT_ABOUT_TIME)):
        return own
    most: Severity = "info" if ceiling.share < LITTLE else "warning" if ceiling.share < MUCH else "critical"
    return min(own, most, key=SEVERITIES.index)


def _ceiling(rule: Rule, verdict: Verdict, analysis: Analysis, facts: Facts) -> Ceiling | None:
    """Return the ceiling cut to the wall time of the analysed steps; replayed where every time that it is made of is."""
    if verdict.ceiling_ns is None or rule.file.ceiling is None or rule.ceiling is None or analysis.wall_ns <= 0:
        return None
    time_ns = min(round(verdict.ceiling_ns), analysis.wall_ns)
    times = [name for name in rule.ceiling.names if rule.unit(name) == "ns"]
    replayed = bool(times) and all(map(facts.replayed, times))
    error = analysis.replay.error_share if replayed and analysis.replay else None
    return Ceiling(time_ns, time_ns / analysis.wall_ns, "replay" if replayed else "formula", rule.file.ceiling.what_if, error)


def _rank(finding: Finding, causes_of_invalid: frozenset[str] = frozenset()) -> tuple[int, int, int, int, str]:
    """Return the place of a finding in the order that Judgement.findings documents."""
    on_measurement = finding.rule == MEASUREMENT_RULE
    invalid = finding.rule in causes_of_invalid or (on_measurement and finding.severity == "critical")
    broken = finding.severity == "critical" and finding.ceiling is None
    group = 0 if invalid else 1 if broken else 4 if on_measurement else 3 if finding.severity == "info" else 2
    time = finding.ceiling.time_ns if finding.ceiling else 0
    known = 1 if finding.ceiling is None else 0
    return (group, known, -time, -GRADES.index(finding.confidence), finding.rule)


def _fold(findings: list[Finding], explains: dict[str, tuple[str, ...]]) -> list[Finding]:
    """Return the findings that no other explains, each with the ids of those that it explains. Its fixes are its own: those of a symptom
    would treat the symptom.

    A symptom goes to the first of its causes in the order of the findings, if it is not larger than that; symptoms of symptoms go along.
    A cause is as severe as what it causes.
    """
    present = {finding.rule: finding for finding in findings}
    explains = {rule: _small_enough(present[rule], explains[rule], present) for rule in present}
    symptoms = {symptom for rule in present for symptom in explains[rule] if symptom in present}
    taken: set[str] = set()
    folded = []
    for finding in findings:
        if finding.rule in symptoms:
            continue
        own = [rule for rule in _all_symptoms(finding.rule, explains, present) if rule not in taken]
        taken.update(own)
        severity = max((finding.severity, *(present[rule].severity for rule in own if present[rule].ceiling)), key=SEVERITIES.index)
        folded.append(msgspec.structs.replace(finding, folded=tuple(own), severity=severity))
    return folded


def _causes_first(findings: list[Finding], explains: dict[str, tuple[str, ...]]) -> list[Finding]:
    """Return the findings with each cause before the symptoms that are too large to be folded under it, but half of which it makes."""
    ordered = list(findings)
    for cause in findings:
        place = ordered.index(cause)
        mine = [at for at, finding in enumerate(ordered[:place]) if finding.rule in explains[cause.rule] and _makes_half(cause, finding)]
        if mine:
            ordered.insert(mine[0], ordered.pop(place))
    return ordered


def _makes_half(cause: Finding, symptom: Finding) -> bool:
    return cause.ceiling is not None and symptom.ceiling is not None and 2 * cause.ceiling.time_ns >= symptom.ceiling.time_ns


def _small_enough(cause: Finding, symptoms: tuple[str, ...], present: dict[str, Finding]) -> tuple[str, ...]:
    """Return the present ones of `symptoms` whose ceiling is not much beyond that of `cause`; all where one of the two is not known."""
    found = [present[rule] for rule in symptoms if rule in present]
    if cause.ceiling is None:
        return tuple(finding.rule for finding in found)
    most = cause.ceiling.time_ns * FOLDED_UP_TO
    return tuple(finding.rule for finding in found if finding.ceiling is None or finding.ceiling.time_ns <= most)


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
