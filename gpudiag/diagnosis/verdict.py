"""What one rule says, given facts: the only place where rules meet numbers. The engine and the self-test both use it."""

from __future__ import annotations

import msgspec

from gpudiag.diagnosis.expression import Lookup, join_reasons
from gpudiag.diagnosis.rule import Rule
from gpudiag.model.finding import Evidence, FactValue, Missing, Severity, Status


class Verdict(msgspec.Struct, frozen=True):
    """The status of a rule, and what a finding needs where it fired."""

    status: Status
    reason: str = ""
    severity: Severity | None = None
    message: str = ""
    evidence: tuple[Evidence, ...] = ()
    fixes: tuple[str, ...] = ()
    """Without those that are needless in this run."""
    ceiling_ns: float | None = None
    """At least 0; None where the rule has none or it is not known. Not yet cut to the wall time."""


_WORDING = ("a_step", "device_word")
"""Facts that are there for the words of messages alone: no evidence of anything."""


def with_params(rule: Rule, facts: Lookup) -> Lookup:
    """Return the lookup of a rule: its own parameters, then the facts."""
    params = rule.file.params

    def lookup(name: str) -> FactValue | Missing:
        return params[name].value if name in params else facts(name)

    return lookup


def decide(rule: Rule, facts: Lookup) -> Verdict:
    """Return what `rule` says under `facts`."""
    lookup = with_params(rule, facts)
    holds = rule.when.evaluate(lookup)
    if isinstance(holds, Missing):
        return Verdict("not_applicable", holds.reason)
    if not holds:
        return Verdict("passed")
    unsaid = [value for name in sorted(rule.message.names) if isinstance(value := lookup(name), Missing)]
    if unsaid:
        return Verdict("not_applicable", join_reasons(*unsaid).reason)
    return _fired(rule, lookup)


def _fired(rule: Rule, lookup: Lookup) -> Verdict:
    held = [(condition, message) for condition, message in rule.details if condition.evaluate(lookup) is True]
    text = " ".join([rule.message.render(lookup), *(message.render(lookup) for _, message in held)])
    return Verdict(
        "fired",
        severity=next((level for level, condition in rule.severity if condition.evaluate(lookup) is True), "info"),
        message=text,
        evidence=_evidence(rule, lookup),
        fixes=tuple(fix for fix in rule.file.fixes if not _needless(rule, fix, lookup)),
        ceiling_ns=_ceiling_ns(rule, lookup),
    )


def _needless(rule: Rule, fix: str, lookup: Lookup) -> bool:
    """Return whether `fix` is known to be needless; where that is not known it is suggested."""
    condition = rule.needless.get(fix)
    return condition is not None and condition.evaluate(lookup) is True


def _evidence(rule: Rule, lookup: Lookup) -> tuple[Evidence, ...]:
    """Return the known facts that the condition, the message and the details look at, by name."""
    names = rule.when.names | rule.message.names
    for condition, message in rule.details:
        names |= condition.names | message.names
    found = ((name, lookup(name), rule.unit(name)) for name in sorted(names) if name not in _WORDING)
    return tuple(Evidence(name, value, unit) for name, value, unit in found if unit is not None and not isinstance(value, Missing))


def _ceiling_ns(rule: Rule, lookup: Lookup) -> float | None:
    if rule.ceiling is None:
        return None
    value = rule.ceiling.evaluate(lookup)
    return None if isinstance(value, (Missing, str)) else max(float(value), 0.0)
