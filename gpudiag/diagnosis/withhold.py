"""Which rules are not judged because of what another says (rules.md A.5: overhead first; no host timing from a bad measurement)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from gpudiag.diagnosis.expression import Lookup
from gpudiag.diagnosis.rule import Rule
from gpudiag.diagnosis.verdict import Verdict, with_params
from gpudiag.model.judged import WITHHELD

NEVER = "HW-"
"""Rules about broken hardware are never withheld (rules.md A.5)."""


def withheld(rules: tuple[Rule, ...], verdicts: Mapping[str, Verdict], facts_of: Callable[[Rule], Lookup]) -> dict[str, Verdict]:
    """Return rule id -> its new verdict for the judged rules that others withhold.

    A rule about the measurement makes them not applicable, for what they look at is not known; any other suppresses them. Rules are
    asked in the order of their ids; one that is itself withheld or failed withholds nothing, nor does a condition that is not known.
    """
    found: dict[str, Verdict] = {}
    judged = [rule for rule in rules if verdicts[rule.id].status in ("fired", "passed")]
    for rule in rules:
        if rule.id in found or verdicts[rule.id].status == "error" or verdicts[rule.id].reason.startswith(WITHHELD):
            continue
        for condition, spec, reason in rule.withholds:
            lookup = with_params(rule, facts_of(rule))
            if condition.evaluate(lookup) is True:
                verdict = _verdict(rule, reason.render(lookup))
                for other in judged:
                    if other.id != rule.id and _matches(other.id, spec.rules):
                        found.setdefault(other.id, verdict)
    return found


def _verdict(rule: Rule, reason: str) -> Verdict:
    if rule.file.bound == "method":
        return Verdict("not_applicable", f"{WITHHELD}{reason} ({rule.id})")
    return Verdict("suppressed", f"{rule.id}: {reason}")


def _matches(identifier: str, patterns: tuple[str, ...]) -> bool:
    return not identifier.startswith(NEVER) and any(fnmatchcase(identifier, pattern) for pattern in patterns)
