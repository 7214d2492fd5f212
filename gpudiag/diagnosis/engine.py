"""Judging: every rule yields exactly one outcome, those that fired become findings, symptoms are folded under their cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from gpudiag.diagnosis.expression import Lookup, join_reasons
from gpudiag.diagnosis.rule import Rule
from gpudiag.facts import find_fact
from gpudiag.facts.host_time import CORRECTED
from gpudiag.facts.registry import NO_ACCELERATOR, WHAT_IF_NS
from gpudiag.model.analysis import Analysis
from gpudiag.model.finding import (
    NO_GAIN,
    SEVERITIES,
    Ceiling,
    Confidence,
    Evidence,
    FactValue,
    Finding,
    Missing,
    RuleOutcome,
    Severity,
    Status,
)
from gpudiag.model.hardware import Device
from gpudiag.model.notices import WITHHELD, Notice, NoticeCode, format_notice, make_notice
from gpudiag.units import format_share

if TYPE_CHECKING:
    from gpudiag.facts import Facts


class Verdict(msgspec.Struct, frozen=True):
    """The status of a rule, and what a finding needs where it fired."""

    status: Status
    notice: Notice | None = None
    severity: Severity | None = None
    message: str = ""
    evidence: tuple[Evidence, ...] = ()
    fixes: tuple[str, ...] = ()
    ceiling_ns: float | None = None
    """At least 0; None where the rule has none or it is not known. Not yet cut to the wall time."""

    @property
    def reason(self) -> str:
        """Return `notice` in words, '' where there is none."""
        return "" if self.notice is None else format_notice(self.notice)


def add_params(rule: Rule, facts: Lookup) -> Lookup:
    """Return the lookup of a rule: its own parameters, then the facts."""
    params = rule.file.params
    return lambda name: params[name].value if name in params else facts(name)


def decide_verdict(rule: Rule, facts: Lookup) -> Verdict:
    """Return what `rule` says under `facts`."""
    lookup = add_params(rule, facts)
    holds = rule.when.evaluate(lookup)
    if not holds:
        return Verdict("passed")
    said = () if isinstance(holds, Missing) else sorted(rule.message.names)
    if missing := [value for value in (holds, *map(lookup, said)) if isinstance(value, Missing)]:
        return Verdict("not_applicable", make_notice(NoticeCode.NOT_APPLICABLE_MISSING, reason=join_reasons(*missing).reason))
    held = [(condition, message) for condition, message in rule.details if condition.evaluate(lookup) is True]
    # The evidence: the known facts that the condition, the message and the details look at, by name
    names = rule.when.names | rule.message.names
    for condition, message in rule.details:
        names |= condition.names | message.names
    # Facts that are there for the words of messages alone: no evidence of anything
    seen = ((name, lookup(name), rule.unit(name)) for name in sorted(names) if name not in ("a_step", "device_word", "loader_wait_base"))
    ceiling = None if rule.ceiling is None else rule.ceiling.evaluate(lookup)
    return Verdict(
        "fired",
        severity=next((level for level, condition in rule.severity if condition.evaluate(lookup) is True), "info"),
        message=" ".join([rule.message.render(lookup), *(message.render(lookup) for _, message in held)]),
        evidence=tuple(
            Evidence(name, value, unit, _explain(name)) for name, value, unit in seen if unit is not None and not isinstance(value, Missing)
        ),
        # a fix that is not known to be needless is suggested
        fixes=tuple(fix for fix in rule.file.fixes if fix not in rule.needless or rule.needless[fix].evaluate(lookup) is not True),
        ceiling_ns=None if ceiling is None or isinstance(ceiling, (Missing, str)) else max(float(ceiling), 0.0),
    )


def _explain(name: str) -> str:
    fact = find_fact(name)
    return fact.doc if fact else ""


GRADES: tuple[Confidence, ...] = get_args(Confidence)

Measurement = Literal["sound", "weak", "invalid"]

_LOST: dict[Measurement, int] = {"sound": 0, "weak": 1, "invalid": 2}
"""Grades that a measurement costs. An invalid one leaves the times of kernels, but not their shares of a step that it stretched."""

LITTLE_SEEN = 0.5
WELL_SEEN = 0.8
"""Share of the kernel time below which a finding about kernels is of low and of medium confidence (heuristic: with half of the time
not seen it may point at the smaller half)."""

_ABOUT_HOST = "idle"
"""How bounds begin that name what the device waits for. A profiler slows the host, and only a bundle tells by how much."""


def grade_confidence(rule: Rule, device: Device | None, facts: Lookup, measured: Measurement) -> tuple[Confidence, tuple[str, ...]]:
    """Return the confidence of a finding of `rule`, from high down to low, and why it is not high.

    It follows how much of the time in kernels has a cost (rules that rest on the roofline) or the op that it belongs to (other rules
    about kernels), what the peaks rest on, and the measurement; for rules about the host, whether it is known what the profiler costs.
    Rules that are not yet stable lose one grade. What is said of the measurement itself is sure.
    """
    if rule.file.role == "measurement":
        return "high", ()
    grade, doubts = 2, list[str]()
    if rule.file.basis == "roofline":
        grade, doubts = _grade_seen(facts("modelled_work_share"), "of the device's work has a cost model")
        if device is not None and device.provenance == "unverified":
            grade = min(grade, 1)
            doubts.append("the device's peaks are not verified")
    elif rule.file.bound.startswith(_ABOUT_HOST) and isinstance(facts("profiler_slowdown"), Missing):
        grade, doubts = 1, ["what the profiler costs is not known"]
    elif rule.file.bound in ("compute", "memory", "overhead"):
        grade, doubts = _grade_seen(facts("attributed_work_share"), "of the device's work is linked to its ops")
    doubts += [] if measured == "sound" else [f"the measurement is {measured}"]
    preview = rule.file.maturity != "stable"
    doubts += ["the rule is in preview"] if preview else []
    return GRADES[max(grade - _LOST[measured] - preview, 0)], tuple(doubts)


def _grade_seen(seen: object, what: str) -> tuple[int, list[str]]:
    if not isinstance(seen, (int, float)):
        return 0, [f"it is not known how much {what}"]
    grade = 0 if seen < LITTLE_SEEN else 1 if seen < WELL_SEEN else 2
    return grade, [f"{format_share(seen)} {what}"] if grade < 2 else []


def explain_by_profiler(rule: Rule, verdict: Verdict, facts: Lookup, as_recorded: Lookup) -> Notice | None:
    """Return why `rule`, which passed, is said to be withheld instead; None where it passes all the same.

    Rules about the host compare its idle time without the profiler's part (facts.host_time). One that passes for that alone would have
    fired on what was recorded (`as_recorded`): what it looks at is not known to be fine.
    """
    slowdown, step_ns = facts("profiler_slowdown"), facts("step_ns")
    if verdict.status != "passed" or not rule.when.names & CORRECTED:
        return None
    if isinstance(slowdown, (Missing, str)) or isinstance(step_ns, (Missing, str)) or slowdown <= 1:
        return None
    if decide_verdict(rule, as_recorded).status != "fired":
        return None
    return make_notice(NoticeCode.WITHHELD_BY_PROFILER, slowdown=slowdown, added_ns=step_ns * (1 - 1 / slowdown))


NEVER_WITHHELD = "HW-"
"""Rules about broken hardware are never withheld (rules.md A.5)."""


def withhold_rules(rules: tuple[Rule, ...], verdicts: Mapping[str, Verdict], facts: Facts) -> dict[str, Verdict]:
    """Return rule id -> its new verdict for the judged rules that others withhold.

    A rule about the measurement makes them not applicable, for what they look at is not known; any other suppresses them. Rules are
    asked in the order of their ids; one that is itself withheld or failed withholds nothing, nor does a condition that is not known.
    """
    found: dict[str, Verdict] = {}
    judged = [rule for rule in rules if verdicts[rule.id].status in ("fired", "passed")]
    for rule in rules:
        verdict = verdicts[rule.id]
        if rule.id in found or verdict.status == "error" or (verdict.notice and verdict.notice.code in WITHHELD):
            continue
        lookup = add_params(rule, _build_lookup(rule, facts))
        for condition, spec, reason in rule.withholds:
            if condition.evaluate(lookup) is not True:
                continue
            if rule.file.bound == "method":
                notice = make_notice(NoticeCode.WITHHELD_BY_MEASUREMENT, reason=reason.render(lookup), rule=rule.id)
                withheld = Verdict("not_applicable", notice)
            else:
                withheld = Verdict("suppressed", make_notice(NoticeCode.SUPPRESSED_BY_RULE, reason=reason.render(lookup), rule=rule.id))
            for other in judged:
                if other.id != rule.id and (
                    not other.id.startswith(NEVER_WITHHELD) and any(fnmatchcase(other.id, pattern) for pattern in spec.rules)
                ):
                    found.setdefault(other.id, withheld)
    return found


SEEN_ENOUGH = 0.5
"""Below this share of the kernel time with shapes, a rule that rests on the roofline can fire but not pass: the cause may lie in the
larger part, which was not seen (replayed graphs, kernels without ops)."""


NOT_ABOUT_TIME = (NEVER_WITHHELD, "CAP-")
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
    fact_errors: dict[str, str] = {}


def judge(analysis: Analysis, rules: Iterable[Rule], facts: Facts | None = None) -> Judgement:
    """Return findings and outcomes of `rules` over `analysis`. Deterministic; a rule that fails costs only itself.

    `facts`: those of `analysis`, where they serve others too: a what-if is then replayed once.
    """
    ordered = tuple(sorted(rules, key=lambda rule: rule.id))
    if facts is None:
        from gpudiag.facts import Facts

        facts = Facts(analysis)
    verdicts = {rule.id: _judge_rule(rule, analysis, facts) for rule in ordered}
    verdicts.update(withhold_rules(ordered, verdicts, facts))
    fired = [rule for rule in ordered if verdicts[rule.id].status == "fired"]
    doubts = {rule.id: verdicts[rule.id] for rule in fired if rule.file.role == "measurement"}
    doubt = next(iter(doubts.values()), None)
    measured: Measurement = "sound" if doubt is None else "invalid" if doubt.severity == "critical" else "weak"
    # What would gain nothing is no finding: something else limits the step, or the rule is about too little of it. Where nobody knows how
    # much the profiler slowed the host, other things may limit the plain step
    no_gain = NoticeCode.NO_GAIN_AT_RECORDED_PACE if analysis.profiler_slowdown is None else NoticeCode.NO_GAIN
    findings = []
    for rule in fired:
        finding = _build_finding(rule, verdicts[rule.id], analysis, facts, measured)
        if finding.ceiling is None or finding.ceiling.share >= NO_GAIN or rule.id.startswith(NOT_ABOUT_TIME):
            findings.append(finding)
        else:
            verdicts[rule.id] = Verdict("suppressed", make_notice(no_gain, share=finding.ceiling.share, message=finding.message))
    outcomes = []
    for rule in ordered:
        verdict = verdicts[rule.id]
        outcomes.append(RuleOutcome(rule.id, verdict.status, verdict.reason or verdict.message, ", ".join(rule.changed), verdict.notice))
    explains = {finding.rule: rule.file.explains for finding in findings for rule in fired if rule.id == finding.rule}
    first = frozenset(rule for rule, symptoms in explains.items() if measured == "invalid" and not doubts.keys().isdisjoint(symptoms))
    folded = _fold_symptoms(sorted(findings, key=lambda finding: _rank_finding(finding, first)), explains)
    folded.sort(key=lambda finding: _rank_finding(finding, first))
    return Judgement(tuple(_put_causes_first(folded, explains)), tuple(outcomes), dict(facts.errors))


def _build_lookup(rule: Rule, facts: Facts) -> Lookup:
    own = rule.file.facts

    def look_up(name: str) -> FactValue | Missing:
        if name in own:
            return facts.query(f"{rule.id}.{name}", own[name].sql, own[name].unit)
        if name == WHAT_IF_NS and (otherwise := rule.otherwise) is not None:
            return facts.what_if_ns(rule.file.what_ifs, otherwise.evaluate(add_params(rule, look_up)))
        return facts.value(name)

    return look_up


def _judge_rule(rule: Rule, analysis: Analysis, facts: Facts) -> Verdict:
    if analysis.device_kind not in rule.file.device_kinds:
        why = NO_ACCELERATOR if analysis.device_kind == "cpu" else "only for runs without an accelerator"
        return Verdict("not_applicable", make_notice(NoticeCode.NOT_APPLICABLE_DEVICE, reason=why))
    if rule.disabled:
        return Verdict("not_applicable", make_notice(NoticeCode.SWITCHED_OFF, config=rule.disabled))
    try:
        lookup = _build_lookup(rule, facts)
        verdict = decide_verdict(rule, lookup)
        if verdict.status != "passed":
            return verdict
        as_recorded: Lookup = lambda name: facts.value(name, as_recorded=True) if name in CORRECTED else lookup(name)  # noqa: E731
        if withheld := explain_by_profiler(rule, verdict, lookup, as_recorded):
            return Verdict("not_applicable", withheld)
        # Too little of the kernel time may have shapes for the rule to pass
        seen = facts.value("shaped_share")
        if rule.file.basis == "roofline" and not isinstance(seen, (Missing, str)) and seen < SEEN_ENOUGH:
            return Verdict("not_applicable", make_notice(NoticeCode.NOT_APPLICABLE_UNSEEN, share=seen))
        return verdict
    except Exception as error:  # noqa: BLE001 - one broken rule must not cost the others
        return Verdict("error", make_notice(NoticeCode.RULE_FAILED, reason=f"{type(error).__name__}: {error}"))


def _build_finding(rule: Rule, verdict: Verdict, analysis: Analysis, facts: Facts, measured: Measurement) -> Finding:
    file, ceiling = rule.file, None
    if verdict.ceiling_ns is not None and rule.ceiling is not None and analysis.wall_ns > 0:
        # Something of the steps remains, and all that was not recorded; replayed where every time that it is made of is
        time_ns = min(round(verdict.ceiling_ns), max(analysis.wall_ns - analysis.breakdown.buckets_ns.outside_recording - 1, 0))
        times = [name for name in rule.ceiling.names if rule.unit(name) == "ns"]
        replayed = bool(times) and all(facts.replayed(name, file.what_ifs) for name in times)
        error = analysis.replay.error_share if replayed and analysis.replay else None
        ceiling = Ceiling(time_ns, time_ns / analysis.wall_ns, "replay" if replayed else "formula", rule.what_if, error)
    confidence, doubts = grade_confidence(rule, analysis.device, facts.value, measured)
    return Finding(
        rule=rule.id,
        title=file.title,
        severity=(verdict.severity or "info") if rule.ceiling is None else limit_severity(rule.id, verdict.severity or "info", ceiling),
        bound=file.bound,
        message=verdict.message,
        why=" ".join(file.why.split()),
        evidence=verdict.evidence,
        ceiling=ceiling,
        confidence=confidence,
        doubts=doubts,
        fixes=verdict.fixes,
        where=facts.places(file.where) if file.where is not None else (),
        references=file.references,
        role=file.role,
    )


def limit_severity(rule: str, own: Severity, ceiling: Ceiling | None) -> Severity:
    """Return the severity that the rule gives, lowered to what the share of the step deserves: info where an upper bound is not known."""
    if rule.startswith(NOT_ABOUT_TIME) and (ceiling is None or ceiling.share < NO_GAIN):
        return own
    most: Severity = "info" if ceiling is None or ceiling.share < LITTLE else "warning" if ceiling.share < MUCH else "critical"
    return min(own, most, key=SEVERITIES.index)


def _rank_finding(finding: Finding, causes_of_invalid: frozenset[str] = frozenset()) -> tuple[int, int, float, int, str]:
    on_measurement = finding.role == "measurement"
    invalid = finding.rule in causes_of_invalid or (on_measurement and finding.severity == "critical")
    broken = finding.severity == "critical" and finding.ceiling is None
    group = 0 if invalid else 1 if broken else 4 if on_measurement else 3 if finding.severity == "info" else 2
    time = float(finding.ceiling.time_ns) if finding.ceiling else 0.0
    if finding.ceiling and finding.bound == "method":  # of the run, of which the steps are what is left
        time /= max(1 - finding.ceiling.share, 1e-9)
    known = 1 if finding.ceiling is None else 0
    return (group, known, -time, -GRADES.index(finding.confidence), finding.rule)


def _fold_symptoms(findings: list[Finding], explains: dict[str, tuple[str, ...]]) -> list[Finding]:
    """Return the findings that no other explains, each with the ids of those that it explains. Its fixes are its own: those of a symptom
    would treat the symptom.

    A symptom goes to the first of its causes in the order of the findings, if it is not larger than that; symptoms of symptoms go along.
    A cause is as severe as what it causes.
    """
    present = {finding.rule: finding for finding in findings}
    folding: dict[str, list[str]] = {}  # the present symptoms of each whose ceiling is not much beyond its own, where both are known
    for cause in findings:
        most = math.inf if cause.ceiling is None else cause.ceiling.time_ns * FOLDED_UP_TO
        shown = (present[rule] for rule in explains[cause.rule] if rule in present)
        folding[cause.rule] = [one.rule for one in shown if one.ceiling is None or one.ceiling.time_ns <= most]
    symptoms = frozenset(symptom for rules in folding.values() for symptom in rules)
    folded, free = [], symptoms
    for finding in (one for one in findings if one.rule not in symptoms):
        # What it explains, directly or through others; the loader rules circles out
        reached, pending = set[str](), list(folding[finding.rule])
        while pending:
            rule = pending.pop()
            if rule not in reached:
                reached.add(rule)
                pending.extend(folding[rule])
        own = sorted((reached - {finding.rule}) & free)
        free -= reached
        severity = max((finding.severity, *(present[rule].severity for rule in own if present[rule].ceiling)), key=SEVERITIES.index)
        folded.append(msgspec.structs.replace(finding, folded=tuple(own), severity=severity))
    return folded


def _put_causes_first(findings: list[Finding], explains: dict[str, tuple[str, ...]]) -> list[Finding]:
    """Return the findings with each cause before the symptoms that are too large to be folded under it, but half of which it makes."""
    ordered = list(findings)
    for cause in findings:
        place = ordered.index(cause)
        mine = [
            at
            for at, finding in enumerate(ordered[:place])
            if finding.rule in explains[cause.rule]
            and (cause.ceiling is not None and finding.ceiling is not None and 2 * cause.ceiling.time_ns >= finding.ceiling.time_ns)
        ]
        if mine:
            ordered.insert(mine[0], ordered.pop(place))
    return ordered
